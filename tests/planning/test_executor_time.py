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
from trainfit.devices.device_table import find_device
from trainfit.planning.certify import host_warnings
from trainfit.planning.effects import Effect, effect_of
from trainfit.planning.full_recompute import full_recompute
from trainfit.planning.master import MasterProblem, Option
from trainfit.planning.model_calls import candidate_calls
from trainfit.planning.planner import Planner
from trainfit.planning.regions import region_graph
from trainfit.planning.replay import executor_seconds, replayed

CALL, OP = 1e-3, 1e-4
CHECKPOINT_CALL, CHECKPOINT_OP = 3e-4, 1e-5


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
    executor = {"region_call": CALL, "region_op": OP}
    executor |= {"checkpoint_call": CHECKPOINT_CALL, "checkpoint_op": CHECKPOINT_OP}
    host = replace(priced.host, **nothing, tensor=0.0, runs_kernels=not gpu, **executor)
    return replace(priced, host=host, costs=tuple(OpCost(op_seconds, "formula") for _ in priced.costs))


def all_again(trace: Trace, *, whole: bool) -> list[Effect]:
    graphs = [region_graph(trace, call, [1.0] * len(trace.ops)) for call in candidate_calls(trace)]
    layers = [g for g in graphs if g is not None and trace.modules[g.module].class_name == "Sequential"]
    assert len(layers) == 4
    effects = [effect_of(trace, layer, full_recompute(layer)) for layer in layers]
    assert all(effect.by_torch for effect in effects)
    return [replace(effect, by_torch=whole) for effect in effects]


@pytest.mark.parametrize("whole", [False, True])
def test_on_a_cpu_it_is_added(trace: Trace, whole: bool) -> None:
    costs, effects = costs_of(trace, gpu=False, op_seconds=1e-3), all_again(trace, whole=whole)
    ops = sum(len(effect.region.ops) for effect in effects)
    again = sum(len(effect.segment) for effect in effects)
    added = replayed(trace, costs, effects).step_seconds - schedule(trace, costs).step_seconds
    executor = 4 * CHECKPOINT_CALL + ops * CHECKPOINT_OP if whole else 4 * CALL + ops * OP
    assert added == pytest.approx(executor + again * 1e-3)
    assert sum(executor_seconds(effect, costs.host) for effect in effects) == pytest.approx(executor)


def test_a_busy_gpu_hides_it_and_an_idle_one_waits(trace: Trace) -> None:
    effects = all_again(trace, whole=False)
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
    between = (planner.smallest().peak_bytes + planner.step.peak_bytes) // 2
    kinds: set[bool] = set()
    for budget in (planner.smallest().peak_bytes, between):
        found = planner.plan(budget)
        plan = found.plan
        assert found.fits and plan.regions
        executor = 0.0
        for region in plan.regions:
            kinds.add(region.whole)
            call, op = (CHECKPOINT_CALL, CHECKPOINT_OP) if region.whole else (CALL, OP)
            executor += call + len(plan.kind_of(region).ops) * op
        recomputed = sum(region.recompute_seconds for region in plan.regions)
        assert plan.added_seconds == pytest.approx(executor + recomputed)
    assert True in kinds


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


def test_a_host_that_waits_for_a_result_has_no_time_to_spare() -> None:
    """All kernels take the same time, and the host nothing but to wait for two of them."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = self.linear(x)[(x > 0).any(1).nonzero()[:, 0]]
            return x

    def build_reads() -> Step:
        return Step.of(Reads(), (torch.randn(64, 8),), loss=lambda out: out.square().mean(), optimizer=None)

    reads = trainfit.capture(build_reads, device="h100")
    costs = costs_of(reads, gpu=True, op_seconds=1e-3)
    found = schedule(reads, costs)
    assert sum(reads.op_name(op) == "aten.nonzero.default" for op in range(len(reads.ops))) == 2
    assert found.host_seconds.sum() == 0
    assert found.occupied_seconds.sum() == pytest.approx(2e-3)
    assert found.spare_seconds == pytest.approx(found.step_seconds - 2e-3)


def test_a_plan_says_when_the_device_waits(trace: Trace) -> None:
    for gpu, op_seconds, said in ((True, 1e-7, True), (True, 1e-2, False), (False, 1e-7, False)):
        costs = costs_of(trace, gpu=gpu, op_seconds=op_seconds)
        warnings = host_warnings(Planner(trace, costs).smallest().plan, costs)
        assert any("waits for the host" in warning for warning in warnings) == said
