"""What every plan keeps to, on steps of random models: budget, promise, order, and the exact optimum."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import trainfit
from trainfit import Step, Trace
from trainfit.costs.roofline import roofline_costs
from trainfit.costs.schedule import schedule
from trainfit.devices.device_table import find_device
from trainfit.planning.effects import Effect, effect_of
from trainfit.planning.minimum_cut import choice_of
from trainfit.planning.model_calls import candidate_calls
from trainfit.planning.planner import Planner
from trainfit.planning.regions import RegionGraph, region_graph
from trainfit.planning.replay import replayed
from trainfit.plans.plan import Plan
from trainfit.traces.simulate import simulate

H100 = find_device("h100")
PRICES = replace(H100, name="the prices of an H100")
"""For steps on any device: a plan for an H100 itself is not for a CPU, and says so when it runs there."""
WIDTH = 64


class Residual(nn.Module):
    """Adds what its parts make of the input, in place or not."""

    def __init__(self, parts: list[nn.Module], in_place: bool) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.parts(x)
        return (changed * 0.5).add_(x) if self.in_place else changed + x


class Twice(nn.Module):
    """Calls the same module two times."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once: torch.Tensor = self.part(x)
        result: torch.Tensor = self.part(once)
        return result * once.sigmoid()


def random_part(numbers: random.Random, depth: int) -> nn.Module:
    if depth and numbers.random() < 0.5:
        parts = [random_part(numbers, depth - 1) for _ in range(numbers.randint(1, 3))]
        kind = numbers.randrange(3)
        if kind == 0:
            return nn.Sequential(*parts)
        return Residual(parts, numbers.random() < 0.4) if kind == 1 else Twice(parts[0])
    wide = WIDTH * numbers.choice((1, 2, 4))
    leaves: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.Sequential(nn.Linear(WIDTH, wide), nn.ReLU(inplace=True), nn.Linear(wide, WIDTH)),
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.2)),
        lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Tanh()),
    ]
    return numbers.choice(leaves)()


def random_step(seed: int, device: str = "cuda") -> Callable[[], Step]:
    def build() -> Step:
        numbers = random.Random(seed)
        torch.manual_seed(seed)
        parts = [random_part(numbers, 2) for _ in range(numbers.randint(2, 5))]
        model = nn.Sequential(*parts, nn.Linear(WIDTH, WIDTH)).to(device)
        # Most of the memory is activations.
        inputs = torch.randn(2048, WIDTH, device=device)
        return Step.of(model, (inputs,), loss=lambda out: out.square().mean(), optimizer=None)

    return build


def planner_of(build: Callable[[], Step], device: str = "cuda") -> Planner:
    trace = trainfit.capture(build, device=H100 if device == "cuda" else "cpu")
    return Planner(trace, roofline_costs(trace, PRICES), allocator=None)


@pytest.mark.parametrize("seed", range(8))
def test_budget_and_order(seed: int) -> None:
    """Peaks are within the budget and grow with it; the time added never does."""
    planner = planner_of(random_step(seed))
    smallest = planner.smallest().peak_bytes
    plans: list[Plan] = []
    for part in range(7):
        budget = smallest + (planner.step.peak_bytes - smallest) * part // 6
        found = planner.plan(budget)
        plan = found.plan
        assert found.fits
        assert plan.peak_bytes <= budget
        assert plan.bound_seconds <= plan.step_seconds
        plans.append(plan)
    for tighter, looser in itertools.pairwise(plans):
        assert tighter.peak_bytes <= looser.peak_bytes
        assert tighter.added_seconds >= looser.added_seconds * (1 - 1e-9)
    assert plans[-1].regions == ()
    assert not planner.plan(smallest * 9 // 10).fits


@pytest.mark.parametrize("seed", range(16, 21))
def test_the_promise_is_what_capture_sees(seed: int) -> None:
    build = random_step(seed, "cpu")
    planner = planner_of(build, "cpu")
    smallest = planner.smallest().peak_bytes
    for share in (0.0, 0.4):
        found = planner.plan(smallest + int(share * (planner.step.peak_bytes - smallest)))
        plan = found.plan
        assert found.fits

        def planned(plan: Plan = plan) -> Step:
            step = build()
            trainfit.apply(step.model, plan)
            return step

        again = simulate(trainfit.capture(planned, device="cpu")).peak_bytes
        assert again <= plan.peak_bytes
        assert again == pytest.approx(plan.peak_bytes, rel=0.01)


def every_plan(trace: Trace, seconds: list[float]) -> Iterator[list[Effect]]:
    """Yield every set of regions that do not overlap with every choice of what runs again."""
    graphs = [region_graph(trace, call, seconds) for call in candidate_calls(trace)]
    regions = {(graph.start, graph.end): graph for graph in graphs if graph is not None}
    for count in range(len(regions) + 1):
        for spans in itertools.combinations(sorted(regions), count):
            if all(first[1] <= second[0] for first, second in itertools.pairwise(spans)):
                choices = [list(every_effect(trace, regions[span])) for span in spans]
                yield from (list(effects) for effects in itertools.product(*choices))


def every_effect(trace: Trace, region: RegionGraph) -> Iterator[Effect]:
    again = [n for n, group in enumerate(region.groups) if group.repeatable and group.storages]
    for count in range(len(again) + 1):
        for repeated in itertools.combinations(again, count):
            choice = choice_of(region.groups, frozenset(repeated))
            if all(region.groups[n].keepable for n in choice.kept):
                yield effect_of(trace, region, choice)


class Small(nn.Module):
    """Few ops, so that every plan can be tried."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        numbers = random.Random(seed)
        wide = WIDTH * numbers.choice((2, 4, 8))
        self.first = nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU())
        self.second = nn.Sequential(nn.Linear(wide, WIDTH), numbers.choice((nn.Tanh(), nn.GELU())))
        self.last = nn.Linear(WIDTH, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.second(self.first(x)))
        return result


@pytest.mark.parametrize("seed", range(4))
def test_small_steps_get_the_best_plan_of_all(seed: int) -> None:
    def build() -> Step:
        inputs = torch.randn(2048, WIDTH, device="cuda")
        model = Small(seed).to("cuda")
        return Step.of(model, (inputs,), loss=lambda out: out.square().mean(), optimizer=None)

    planner = planner_of(build)
    trace, costs = planner.trace, planner.costs
    seconds = schedule(trace, costs).marginal_seconds.tolist()
    tried = []
    for effects in every_plan(trace, seconds):
        replay = replayed(trace, costs, effects)
        tried.append((replay.timeline.peak_bytes, replay.step_seconds))
    assert len(tried) > 50
    smallest = min(peak for peak, _ in tried)
    assert planner.smallest().peak_bytes == pytest.approx(smallest, rel=1e-3)
    for part in range(1, 9):
        budget = smallest + (planner.step.peak_bytes - smallest) * part // 8
        found = planner.plan(budget)
        plan = found.plan
        assert found.fits
        best = min(step for peak, step in tried if peak <= budget)
        assert plan.step_seconds == pytest.approx(best, rel=1e-6)
