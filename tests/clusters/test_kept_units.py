"""Units of FSDP that stay whole after forward: an edit of the trace, chosen together with checkpoints.

The truth is a capture with `set_reshard_after_forward(False)` really called: the edited trace equals it, op
by op and storage by storage. What is chosen is compared with every choice, one after the other.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import trainfit
from trainfit.api.request import Request
from trainfit.applying.unit_sharding import set_units, units_of
from trainfit.devices.device_table import find_device
from trainfit.models.parallel.unit_grain import Grain, units_are
from trainfit.planning.kept_problem import JointProblem
from trainfit.planning.kept_units import keep_units, unit_keeps
from trainfit.planning.planner import Planner
from trainfit.planning.replay import replayed
from trainfit.sharding.unit_search import search
from trainfit.sharding.unit_trials import Setting, UnitTrials
from trainfit.traces.trace import Trace

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from wrapping_baseline import chosen_wrapping, wrapped_trace

Mesh = tuple[tuple[str, int], ...]
FSDP: Mesh = (("fsdp", 8),)


def captured(
    target: str | Callable[..., trainfit.Step],
    mesh: Mesh,
    kept: Collection[str] = (),
    *,
    grain: Grain = "blocks",
    prefetch: int = 1,
    dtype: str | None = None,
) -> Trace:
    def change(step: trainfit.Step) -> trainfit.Step:
        set_units(step.model, units_of(step.model), tuple(kept), prefetch)
        return step

    cluster = trainfit.Cluster(world_size=math.prod(size for _, size in mesh), mesh=mesh)
    given = (
        {} if not isinstance(target, str) else {"batch": 2, "seq": 32, "dtype": dtype, "set": {"layers": 3}}
    )
    options = trainfit.StepOptions(**given)  # type: ignore[arg-type]
    request = Request(target, find_device("h100"), options, None, cluster=cluster, changed=change)
    with units_are(grain):
        return request.trace()


def edited(trace: Trace, kept: Collection[str]) -> Trace:
    inside = len(trace.modules[trace.model].name) + 1
    keeps = {trace.modules[module].name[inside:]: keep for module, keep in unit_keeps(trace).items()}
    return keep_units(trace, [keeps[name] for name in kept])


def assert_equal(found: Trace, real: Trace) -> None:
    found.check()
    # Of the runs that were not recorded an edit knows nothing.
    for field in fields(found):
        if field.name != "steps":
            assert getattr(found, field.name) == getattr(real, field.name), field.name
    assert found.steps.recorded == real.steps.recorded


@pytest.mark.parametrize(
    ("model", "mesh", "grain", "prefetch", "dtype", "kept"),
    [
        ("llama-tiny", FSDP, "blocks", 1, "bf16-autocast", ("blocks.2",)),
        ("llama-tiny", FSDP, "parts", 1, None, ("blocks.0.attention", "blocks.1", "blocks.2")),
        ("llama-tiny", FSDP, "blocks", 2, None, ("blocks.0", "blocks.1", "blocks.2")),
        ("llama-tiny", (("replicate", 2), ("fsdp", 4)), "blocks", 1, None, ("blocks.0", "blocks.2")),
        ("gpt2-tiny", (("fsdp", 3), ("tp", 2)), "blocks", 1, None, ("blocks.0", "blocks.1")),
    ],
)
def test_an_edit_is_what_a_capture_finds(
    model: str, mesh: Mesh, grain: Grain, prefetch: int, dtype: str | None, kept: tuple[str, ...]
) -> None:
    base = captured(model, mesh, grain=grain, prefetch=prefetch, dtype=dtype)
    real = captured(model, mesh, kept, grain=grain, prefetch=prefetch, dtype=dtype)
    assert len(real.ops) < len(base.ops)
    assert_equal(edited(base, kept), real)


def accumulated(mesh: DeviceMesh, device: str = "cpu") -> trainfit.Step:
    """Two micro-batches, so that each unit is gathered again twice."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(8, 64, device=device)

    def run() -> None:
        for part in inputs.chunk(2):
            model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trainfit.Step(model, optimizer, run)


def test_an_edit_of_a_step_with_two_backwards() -> None:
    base = captured(accumulated, FSDP)
    assert_equal(edited(base, ("0", "2")), captured(accumulated, FSDP, ("0", "2")))


class Rows(torch.nn.Module):
    """Four layers in a row, two of them under a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        found: torch.Tensor = checkpoint(self._middle, x, use_reentrant=False)
        return found + self.layers[3](x)

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers[2](self.layers[1](x).relu())
        return found


def checkpointed(mesh: DeviceMesh, device: str = "cpu") -> trainfit.Step:
    model = Rows().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(8, 64, device=device)
    return trainfit.Step.of(model, inputs, loss=lambda out: out.square().mean(), optimizer=optimizer)


def test_units_that_a_checkpoint_gathers_are_left_alone() -> None:
    """Torch gathers them in the recomputation, in another way: the setting is captured instead."""
    base = captured(checkpointed, FSDP)
    inside = len(base.modules[base.model].name) + 1
    known = {base.modules[module].name[inside:] for module in unit_keeps(base)}
    assert known == {"layers.0", "layers.3"}
    assert_equal(edited(base, ("layers.0",)), captured(checkpointed, FSDP, ("layers.0",)))


CLUSTER = trainfit.Cluster(world_size=16, mesh=(("fsdp", 16),), network_bytes_per_second=12.5e9)
WIDE = trainfit.StepOptions(
    batch=1, seq=1024, dtype="bf16", set={"layers": 3, "hidden": 2048, "feed_forward": 6144, "heads": 16}
)


@pytest.fixture(scope="module")
def trials() -> UnitTrials:
    """A step that waits for the network, with a budget that is never asked for."""
    return UnitTrials("llama-tiny", find_device("h100"), WIDE, None, CLUSTER, "70GiB", seconds_limit=2)


def test_the_program_has_the_time_of_the_replay(trials: UnitTrials) -> None:
    """With what is kept given, the period is the replay's but for what ops take from each other."""
    one = trials._captured(Setting())
    keeps = tuple(one.keeps.values())
    for count in range(4):
        kept = range(count)
        answer = one.problem.solve(1 << 50, seconds_limit=10, gap_seconds=0.0, kept=kept)
        trace = keep_units(one.trace, [keeps[number] for number in kept])
        step = replayed(trace, one.request.price(trace), ())
        assert answer.seconds == pytest.approx(step.step_seconds, rel=0.01)
        assert answer.bound <= step.step_seconds * 1.01


def test_the_program_has_the_memory_of_the_replay(trials: UnitTrials) -> None:
    """By bisection: the smallest budget with these units kept and nothing checkpointed is their peak."""
    one = trials._captured(Setting())
    keeps = tuple(one.keeps.values())
    problem = JointProblem.of(one.planner.step.replay, [], [], keeps)
    for kept in ((), (0,), (1, 2), (0, 1, 2)):
        trace = keep_units(one.trace, [keeps[number] for number in kept])
        peak = replayed(trace, one.request.price(trace), ()).timeline.peak_bytes

        def fits(budget: int, kept: tuple[int, ...] = kept) -> bool:
            return problem.solve(budget, seconds_limit=5, gap_seconds=0.0, kept=kept).feasible

        assert fits(peak)
        assert not fits(peak - 4096)


@pytest.mark.parametrize(
    ("layers", "share"),
    [
        (2, 0.5),
        pytest.param(3, 0.35, marks=pytest.mark.slow),
        pytest.param(3, 0.7, marks=pytest.mark.slow),
    ],
)
def test_the_best_of_all_settings_is_found(layers: int, share: float) -> None:
    """Every set of kept units, with every choice of units and prefetch, each with its fastest plan."""
    options = replace(WIDE, set={**WIDE.set, "layers": layers})

    def trials_within(budget: int | str) -> UnitTrials:
        return UnitTrials("llama-tiny", find_device("h100"), options, None, CLUSTER, budget, None, 2.0)

    roomy = trials_within("70GiB")
    least = Planner(*_priced(roomy), None).smallest().peak_bytes
    most = roomy.trial(Setting(kept=roomy.trial(Setting()).units)).plan.peak_bytes
    asked = trials_within(int(least + share * (most - least)))
    found = search(asked, ("blocks", "whole")).best
    every = [asked.trial(Setting("whole"))]
    for prefetch in (1, 2):
        units = asked.trial(Setting(prefetch=prefetch)).units
        for count in range(len(units) + 1):
            for kept in itertools.combinations(units, count):
                every.append(asked.trial(Setting("blocks", kept, prefetch)))
    assert found.fits
    assert found.seconds <= min(one.seconds for one in every if one.fits) * 1.002


@pytest.mark.slow
def test_what_is_found_is_faster_than_fsdp_ilp() -> None:
    """With memory enough PyTorch's formulation wraps nothing: everything is gathered before it is needed."""
    options = replace(WIDE, set={**WIDE.set, "layers": 2})
    request = Request("llama-tiny", find_device("h100"), options, None, cluster=CLUSTER)
    kinds = chosen_wrapping(request, 1 << 36)
    assert kinds == ("root", "root")
    trace = wrapped_trace(request, kinds)
    theirs = replayed(trace, request.price(trace), ()).step_seconds
    trials = UnitTrials("llama-tiny", find_device("h100"), options, None, CLUSTER, 1 << 36, None, 2.0)
    assert search(trials, ("blocks", "parts", "whole")).best.seconds < theirs


def _priced(trials: UnitTrials) -> tuple[Trace, trainfit.CostTable]:
    one = trials._captured(Setting())
    return one.trace, one.planner.costs
