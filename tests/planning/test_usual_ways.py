"""A plan is never slower than a usual way within the same budget, and a frontier is beaten by none.

Where ops are short, what a region costs is the host's time, and the allocator cuts little memory up much:
such steps are where searches used to end with something slower than checkpointing a block or two.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import trainfit
from trainfit.api.choose import frontier_step, plan_step
from trainfit.api.request import Request
from trainfit.costs.roofline import roofline_costs
from trainfit.devices.device_table import find_device
from trainfit.planning.baselines import Baseline, UsualWays, faster_ways
from trainfit.planning.certify import Unplanned
from trainfit.planning.planner import Planner

MIB = 2**20
STEPS = (
    *(("gpt2-tiny", 8, "a100-40gb"), ("gpt2-tiny", 2, "h100"), ("llama-tiny", 4, "a100-40gb")),
    *(("bert-tiny", 8, "h100"), ("vit-tiny", 16, "a100-40gb"), ("bert-tiny", 4, "cpu")),
)
FRONTIERS = (
    *(("gpt2-tiny", 8, "a100-40gb", 4), ("llama-tiny", 4, "a100-40gb", 1), ("bert-tiny", 8, "h100", 2)),
    *(("vit-tiny", 16, "a100-40gb", 1), ("gpt2-tiny", 8, "cpu", 2), ("resnet-tiny", 8, "cpu", 2)),
)
ROUNDING = 1 + 1e-9


def planner_of(model: str, batch: int, device: str) -> Planner:
    request = Request(model, device, trainfit.StepOptions(batch=batch))
    trace = request.trace()
    return Planner(trace, request.price(trace), request.allocator)


@pytest.mark.parametrize(("model", "batch", "name"), STEPS)
def test_no_usual_way_within_the_budget_is_faster(model: str, batch: int, name: str) -> None:
    planner = planner_of(model, batch, name)
    least, most = planner.smallest().memory_bytes, planner.nothing().memory_bytes
    compared = 0
    for share in (0.1, 0.35, 0.65, 0.9):
        budget = round(least + share * (most - least))
        found = planner.plan(budget)
        assert found.fits
        for way in (one.baseline for one in UsualWays(planner.step).within(budget)):
            if way.memory_bytes <= budget and way.differs is None:
                assert found.step_seconds <= way.step_seconds * ROUNDING, (budget, way)
                compared += 1
        assert planner.step.step_seconds <= found.plan.bound_seconds <= found.step_seconds * ROUNDING
    assert compared or all(way.baseline.differs for way in planner.usual.within(most) if way.effects)


@pytest.mark.parametrize(("model", "batch", "name", "points"), FRONTIERS)
def test_no_usual_way_beats_a_point_of_a_frontier(model: str, batch: int, name: str, points: int) -> None:
    found = frontier_step(Request(model, name, trainfit.StepOptions(batch=batch)), points)
    for way in found.baselines:
        beaten = [
            point
            for point in found.points
            if way.memory_bytes <= point.memory_bytes and way.step_seconds * ROUNDING < point.step_seconds
        ]
        # A way that computes something else is no plan; that it is faster is said.
        assert not beaten or (way.differs is not None and any(way.name in said for said in found.warnings))


def test_what_the_host_needs_counts_in_choices_by_price() -> None:
    """The device waits for the host in this step: a region costs what Python takes to run it again.

    Without that, all trials went to choices whose ops are followed one by one, each slower than a block that
    torch computes again. No usual way is asked here.
    """
    planner = planner_of("gpt2-tiny", 8, "a100-40gb")
    assert planner.problem.spare_seconds == 0.0 and planner.trials is not None
    priced = {tuple(o.effects[0].by_torch for o in one.options) for one in planner.trials.choices.by_price}
    assert (True,) * 4 in priced  # the four blocks, left to torch
    budget = 197 * MIB
    found = planner.trials.search(budget, float("inf"), planner._solved)
    greedy = planner.usual.within(budget)[-1].baseline
    assert found is not None and greedy.memory_bytes <= budget
    assert found.step_seconds <= greedy.step_seconds * ROUNDING


def test_where_nothing_else_is_found_a_usual_way_is_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = planner_of("gpt2-tiny", 8, "a100-40gb")
    budget = 197 * MIB
    assert planner.trials is not None
    monkeypatch.setattr(planner.trials, "search", lambda *_: None)
    found = planner.plan(budget)
    greedy = planner.usual.within(budget)[-1]
    assert found.fits and found.step_seconds == greedy.baseline.step_seconds
    assert found.promised().memory_bytes == greedy.baseline.memory_bytes
    # It is a plan like any other: torch computes the regions again.
    assert [region.whole for region in found.plan.regions] == [True] * greedy.baseline.regions
    slow = planner.certified([0], budget, 0.0)
    monkeypatch.setattr(planner.trials, "search", lambda *_: replace(slow))
    assert planner.plan(budget).step_seconds <= greedy.baseline.step_seconds


# What torch alone does not do as the step does -------------------------------------------------------------


def test_a_way_that_moves_statistics_twice_is_no_plan() -> None:
    """ResNet on this device: the host takes longer to follow a block than torch to run it again."""
    request = Request("resnet-18", "a100-40gb", trainfit.StepOptions(batch=4))
    result = plan_step(request, 304 * MIB)
    ways = {way.name: way for way in result.baselines}
    assert ways["keep everything"].differs is None
    assert ways["greedy"].differs is not None and "statistics" in ways["greedy"].differs
    assert ways["greedy"].step_seconds < result.plan.step_seconds
    (note,) = [text for text in result.warnings if text.startswith("faster than a plan: ")]
    assert "greedy (304.00 MiB, " in note and "twice in every step" in note
    assert not any(region.whole for region in result.plan.regions if "stages" in region.module)


def test_only_ways_that_are_faster_and_no_plans_are_named() -> None:
    ways = [
        Baseline("full", 4, 80, 100, 3.0, "they differ"),
        Baseline("greedy", 2, 80, 100, 2.0, "they differ"),
        Baseline("every second block", 2, 80, 120, 1.0, "they differ"),
        Baseline("keep everything", 0, 80, 100, 1.0),
    ]
    (text,) = faster_ways([(110, 2.5)], ways)
    assert text.startswith("faster than a plan: greedy (100 B, 2.00 s); but they differ. ")
    assert faster_ways([(110, 2.0), (90, 9.0)], ways) == ()


class Accumulating(nn.Module):
    """Three blocks, an odd number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_block_is_checkpointed_in_all_passes_or_in_none() -> None:
    """A model cannot tell its passes apart: every second block is the same blocks each time."""

    def build() -> trainfit.Step:
        model = Accumulating()

        def run() -> None:
            for _ in range(2):
                model(torch.randn(512, 64)).square().mean().backward()
            model.zero_grad()

        return trainfit.Step(model=model, optimizer=None, run=run)

    trace = trainfit.capture(build, device="cpu")
    ways = UsualWays(Unplanned.of(trace, roofline_costs(trace, find_device("a100-40gb")))).within(0)
    modules = {
        way.baseline.name: [trace.module_name(effect.region.module) for effect in way.effects] for way in ways
    }
    first, second, third = (f"Accumulating.blocks.{number}" for number in range(3))
    assert sorted(modules["full"]) == [first, first, second, second, third, third]
    assert sorted(modules["every second block"]) == [first, first, third, third]
    assert {way.baseline.name: way.baseline.regions for way in ways}["every second block"] == 2
