"""The executor's own time: in the promise, hidden where a GPU is busy anyway, and weighed by the solver."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import trainfit
from trainfit import Step, Trace
from trainfit.costs.roofline import roofline_costs
from trainfit.costs.schedule import schedule
from trainfit.costs.table import CostTable, OpCost
from trainfit.devices import find_device
from trainfit.planning.baselines import everything_again
from trainfit.planning.certify import host_warnings
from trainfit.planning.effects import Effect, effect_of
from trainfit.planning.master import MasterProblem, Option
from trainfit.planning.regions import candidate_calls, region_graph
from trainfit.planning.replay import executor_seconds, replayed
from trainfit.planning.solve import Planner

CALL, OP = 1e-3, 1e-4


class Layers(nn.Module):
    """Four alike."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in "1234"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def build() -> Step:
    model = Layers()
    return Step.of(model, (torch.randn(512, 8),), loss=lambda out: out.square().mean(), optimizer=None)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trainfit.capture(build, device="cpu")


def costs_of(trace: Trace, *, gpu: bool, op_seconds: float) -> CostTable:
    """Every op takes the device the same time; the host takes nothing but what the executor does."""
    priced = roofline_costs(trace, find_device("h100"))
    nothing = dict.fromkeys(
        ("forward_op", "backward_op", "optimizer_op", "view_op", "module_call", "launch"), 0.0
    )
    host = replace(priced.host, **nothing, tensor=0.0, runs_kernels=not gpu, region_call=CALL, region_op=OP)
    return replace(priced, host=host, costs=tuple(OpCost(op_seconds, "formula") for _ in priced.costs))


def all_again(trace: Trace) -> list[Effect]:
    graphs = [region_graph(trace, call, [1.0] * len(trace.ops)) for call in candidate_calls(trace)]
    layers = [g for g in graphs if g is not None and trace.modules[g.module].class_name == "Sequential"]
    assert len(layers) == 4
    return [effect_of(trace, layer, everything_again(layer)) for layer in layers]


def test_on_a_cpu_it_is_added(trace: Trace) -> None:
    costs, effects = costs_of(trace, gpu=False, op_seconds=1e-3), all_again(trace)
    ops = sum(len(effect.region.ops) for effect in effects)
    again = sum(len(effect.segment) for effect in effects)
    added = replayed(trace, costs, effects).step_seconds - schedule(trace, costs).step_seconds
    assert added == pytest.approx(4 * CALL + ops * OP + again * 1e-3)
    alone = replayed(trace, costs, effects, by_torch=True).step_seconds - schedule(trace, costs).step_seconds
    assert alone == pytest.approx(again * 1e-3)
    assert sum(executor_seconds(e.region, costs.host) for e in effects) == pytest.approx(4 * CALL + ops * OP)


def test_a_busy_gpu_hides_it_and_an_idle_one_waits(trace: Trace) -> None:
    effects = all_again(trace)
    again = sum(len(effect.segment) for effect in effects)
    executor = sum(CALL + len(effect.region.ops) * OP for effect in effects)
    for op_seconds in (1e-2, 1e-7):
        costs = costs_of(trace, gpu=True, op_seconds=op_seconds)
        step = replayed(trace, costs, effects).step_seconds
        # The longer of the two queues, but for the op that the other one waits for.
        longer = max((len(trace.ops) + again) * op_seconds, executor)
        assert 0.999 * longer <= step <= 1.01 * longer + op_seconds


def test_the_plan_promises_it(trace: Trace) -> None:
    planner = Planner(trace, costs_of(trace, gpu=False, op_seconds=1e-6))
    plan = planner.smallest()
    ops = sum(len(plan.kind_of(region).ops) for region in plan.regions)
    recomputed = sum(region.recompute_seconds for region in plan.regions)
    assert plan.regions
    assert plan.added_seconds == pytest.approx(len(plan.regions) * CALL + ops * OP + recomputed)


def test_the_solver_knows_when_the_device_would_wait() -> None:
    """Two ways to free enough: one loads the host, the other the device."""

    def chosen(spare_seconds: float) -> tuple[list[int], float]:
        options = [Option(0, (), seconds=1.0, host_seconds=5.0), Option(1, (), seconds=3.0, host_seconds=0.5)]
        problem = MasterProblem(options, [], spare_seconds, peak=[100 << 20], entering=[{}])
        problem.covering = [{0: 50 << 20, 1: 50 << 20}]
        found = problem.solve(60 << 20, seconds_limit=10.0, gap_seconds=0.0)
        assert found.bound == pytest.approx(found.seconds, rel=1e-4)
        return found.options, found.seconds

    assert chosen(spare_seconds=4.0) == ([0], 1.0)
    assert chosen(spare_seconds=2.5) == ([0], 2.5)
    assert chosen(spare_seconds=1.0) == ([1], 3.0)
    assert chosen(spare_seconds=0.0) == ([1], 3.0)


def test_a_plan_says_when_the_device_waits(trace: Trace) -> None:
    for gpu, op_seconds, said in ((True, 1e-7, True), (True, 1e-2, False), (False, 1e-7, False)):
        costs = costs_of(trace, gpu=gpu, op_seconds=op_seconds)
        warnings = host_warnings(Planner(trace, costs).smallest(), costs)
        assert any("waits for the host" in warning for warning in warnings) == said
