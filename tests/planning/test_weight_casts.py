"""A module that is called again under autocast finds its weights cast; run again, it casts them again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainfit
from trainfit import Step
from trainfit.capturing import capture
from trainfit.costs.roofline import roofline_costs
from trainfit.devices.device_table import find_device
from trainfit.planning.effects import effect_of
from trainfit.planning.full_recompute import full_recompute
from trainfit.planning.planner import Planner
from trainfit.planning.regions import region_graph
from trainfit.planning.weight_casts import is_kept_by_autocast
from trainfit.traces.settings import is_cast_to
from trainfit.verifying.measuring import measure_step
from trainfit.verifying.plan_comparison import compare_results
from trainfit.workspace.measured import THOROUGH

WIDTH, BATCH = 64, 48


def build(autocast: bool = True) -> Step:
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), part, nn.Sigmoid(), part, nn.Sigmoid(), part)
    dtype = torch.bfloat16 if autocast else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Step.of(model, torch.randn(BATCH, WIDTH), loss=torch.mean, optimizer=optimizer, autocast=dtype)


def test_the_second_call_casts_the_weights_again_when_it_is_computed_again() -> None:
    trace = trainfit.capture(build)
    seconds = [0.0] * len(trace.ops)
    calls = [n for n, call in enumerate(trace.calls) if trace.module_name(call.module) == "Sequential.1"]
    first, second, _ = (region_graph(trace, call, seconds) for call in calls)
    assert first is not None and second is not None
    assert not first.casts and len(second.casts) == 4  # two weights, two biases
    assert all(is_kept_by_autocast(trace, storage) for storage in second.casts)
    assert second.casts.isdisjoint(second.inputs)
    effect = effect_of(trace, second, full_recompute(second))
    casts = [op for op in effect.segment if op not in second.ops]
    assert sorted(storage for op in casts for storage in trace.ops[op].creates) == sorted(second.casts)
    # Each comes before what reads it.
    seen: set[int] = set()
    for op in effect.segment:
        assert second.casts.intersection(trace.ops[op].reads) <= seen
        seen.update(trace.ops[op].creates)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_the_promise_is_kept(every: int) -> None:
    """For every region by itself, and all that it could keep; each is a measured run."""
    trace = capture(build, limits=THOROUGH)
    planner = Planner(trace, roofline_costs(trace, find_device("h100")), allocator=None)
    plans = [planner.certified([number], 0, 0.0).plan for number in range(len(planner.problem.options))]
    assert {("Sequential.1", call) for call in range(3)} <= {
        (region.module, region.call) for plan in plans for region in plan.regions
    }
    for plan in plans[::every]:
        measured = measure_step(build, "cpu", plan, steps=trace.steps, timed=0).peak_bytes
        assert measured == plan.peak_bytes, plan.regions
    assert compare_results(build, plans[0]).differences == ()


def test_without_autocast_there_is_nothing_to_cast() -> None:
    trace = trainfit.capture(lambda: build(autocast=False))
    assert not any(is_kept_by_autocast(trace, number) for number in range(len(trace.storages)))


@pytest.mark.parametrize(
    ("dtype", "name", "is_on"),
    [
        ("bf16-autocast", "bfloat16", True),
        ("bf16-autocast", "float16", False),
        ("bf16+fp32/bf16+fp16-autocast", "float16", True),
        ("bf16", "bfloat16", False),
        (None, "bfloat16", False),
    ],
)
def test_which_casts_are_autocasts(dtype: str | None, name: str, is_on: bool) -> None:
    assert is_cast_to(dtype, name) is is_on
