"""Inputs of regions in the host's memory: which can be, what that frees, and that results stay the same."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from planned_models import Subject, assert_same_with
from test_offload import COMPUTER, SUBJECTS, planned
from torch import nn

from trainfit.applying import applied, apply
from trainfit.capturing import capture
from trainfit.costs.roofline import roofline_costs
from trainfit.errors import FileFormatError, PlanDoesNotFit
from trainfit.planning import master
from trainfit.planning.host_copies import CopyWindow, HostLink
from trainfit.planning.master import MasterProblem
from trainfit.planning.plan_replay import replay_plan
from trainfit.planning.planner import Planner
from trainfit.planning.region_inputs import inputs_for_host
from trainfit.planning.regions import region_graph
from trainfit.plans.plan import InputPlace, Plan
from trainfit.plans.plan_store import load_plan, save_plan
from trainfit.traces.trace import Trace
from trainfit.verifying.measuring import measure_step
from trainfit.workspace.measured import THOROUGH

SLOW = 1e9
"""Bytes per second: results are recomputed rather than copied, and inputs can only be copied."""


class Part(nn.Module):
    """Takes what it is given besides its first input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width),
        )

    def forward(self, x: torch.Tensor, *more: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
        y = self.down(nn.functional.gelu(self.up(self.norm(x))))
        for other in more:
            y = y * other
        return y if scale is None else y * scale


class Parts(nn.Module):
    """Two parts, called in a way that says who else holds their inputs."""

    def __init__(self, way: str, width: int = 16) -> None:
        super().__init__()
        self.stem, self.parts = nn.Linear(width, width), nn.ModuleList(Part(width) for _ in range(2))
        self.way = way
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        first, second = self.parts
        if self.way == "in a row":
            x = second(first(x) + 1.0)
        elif self.way == "in Python":
            self.seen = [x]
            x = second(first(x) + 1.0)
        elif self.way == "skip":
            x = second(first(x) + 1.0) + x.square()
        elif self.way == "shared":
            x = second(first(x) + 1.0, scale := torch.tanh(x.detach())) + first(x, scale).mean()
        elif self.way == "halves":
            both = torch.cat([x, x.sin()])
            left, right = both.chunk(2)
            x = first(left) + second(right)
        elif self.way == "view":
            x = second(first(x).unflatten(0, (2, -1)).transpose(0, 1) + 1.0)
        elif self.way == "saved by its maker":
            x = second(first(x).sigmoid())
        elif self.way == "by name":
            inner = first(x).sin() + 0.5
            x = second(first(x) + 1.0, scale=inner)
        return x.square().mean()


def subject(way: str) -> Subject:
    return Subject(lambda: Parts(way), lambda: torch.randn(40, 16), ())


@cache
def traced(way: str) -> Trace:
    return capture(subject(way).build, limits=THOROUGH)


def movable(way: str, part: int) -> list[int]:
    """Return the shapes, as bytes, of the inputs of a part that can be on the host."""
    trace = traced(way)
    found = (
        region_graph(trace, number, [0.0] * len(trace.ops))
        for number, call in enumerate(trace.calls)
        if trace.module_name(call.module) == f"Parts.parts.{part}"
    )
    region = next(region for region in found if region is not None)
    window = CopyWindow(-1, region.end, region.first_unpack)
    return [one.bytes for one in inputs_for_host(trace, region, window)]


ROWS = 40 * 16 * 4


@pytest.mark.parametrize(
    ("way", "part", "bytes_of_inputs"),
    [
        ("in a row", 1, [ROWS]),
        # The stem's result is an input like any other: nothing but the part looks at it.
        ("in a row", 0, [ROWS]),
        ("in Python", 0, []),
        ("in Python", 1, [ROWS]),
        ("skip", 0, []),
        ("skip", 1, [ROWS]),
        ("shared", 1, [ROWS]),
        ("halves", 0, []),
        ("halves", 1, []),
        ("view", 1, [ROWS]),
        ("saved by its maker", 1, []),
        ("by name", 1, [ROWS, ROWS]),
    ],
)
def test_only_what_nobody_else_holds_can_be_on_the_host(
    way: str, part: int, bytes_of_inputs: list[int]
) -> None:
    assert movable(way, part) == bytes_of_inputs


def planner_of(trace: Trace, rate: float, *, overlaps: bool) -> Planner:
    return Planner(trace, roofline_costs(trace, COMPUTER), None, HostLink(rate, 0.0, overlaps))


def together(found: Planner, wanted: list[int]) -> list[int]:
    """Return options, the first ones that can be chosen together."""
    chosen: list[int] = []
    for number in wanted:
        beside = {other for chain in found.problem.exclusive if number in chain for other in chain}
        if beside.isdisjoint(chosen):
            chosen.append(number)
    return chosen


def plans_with_inputs(found: Planner, count: int) -> Iterator[Plan]:
    """Yield plans of which every region has an input on the host."""
    options = found.problem.options
    moving = [n for n, option in enumerate(options) if option.effects[0].choice.host_inputs]
    for seed in range(count):
        chosen = together(found, random.Random(seed).sample(moving, len(moving)))
        certified = found.certified(chosen, found.step.peak_bytes, 0.0)
        certified.timeline.trace.check()
        yield certified.promised()


@cache
def plan_with_inputs(way: str, *, overlaps: bool = False) -> Plan:
    """Return a plan that recomputes, and has inputs on the host."""
    return next(plans_with_inputs(planner_of(traced(way), SLOW, overlaps=overlaps), 1))


@pytest.mark.parametrize("overlaps", [False, True], ids=["at once", "beside the next block"])
@pytest.mark.parametrize("name", [name for name in SUBJECTS if name != "in place"])
def test_inputs_free_as_much_as_promised_and_change_nothing(name: str, overlaps: bool) -> None:
    # GIVEN plans whose regions have inputs on the host, and recompute
    trace = capture(SUBJECTS[name].build, limits=THOROUGH)
    for plan in plans_with_inputs(planner_of(trace, SLOW, overlaps=overlaps), 2):
        assert any(plan.kind_of(region).host_inputs for region in plan.regions)
        # WHEN the step runs with them
        measured = measure_step(planned(name, plan), "cpu").peak_bytes
        # THEN their peak is the promised one, to the byte, and so is that of the file
        assert plan.peak_bytes == measured
        assert replay_plan(plan, trace)[1] == measured
        # AND results are the same
        assert_same_with(SUBJECTS[name], plan, steps=2)


@pytest.mark.parametrize("way", ["in a row", "view", "by name", "shared"])
def test_inputs_by_any_way_of_calling_are_what_they_were(way: str) -> None:
    plan = plan_with_inputs(way)
    assert plan.host_bytes > 0
    assert_same_with(subject(way), plan, steps=2)

    def build() -> Any:
        step = subject(way).build()
        apply(step.model, plan)
        return step

    assert measure_step(build, "cpu").peak_bytes == plan.peak_bytes


def test_the_solver_finds_the_best_of_all_choices_with_inputs() -> None:
    # GIVEN some options of a step, with inputs on the host and without
    found = planner_of(traced("in a row"), 5e9, overlaps=False)
    options = found.problem.options
    numbers = random.Random(1).sample(range(len(options)), len(options))
    with_inputs = [n for n in numbers if options[n].effects[0].choice.host_inputs][:6]
    without = [n for n in numbers if n not in with_inputs and not options[n].effects[0].choice.copies][:6]
    picked = sorted(with_inputs + without)
    exclusive = [[picked.index(n) for n in chain if n in picked] for chain in found.problem.exclusive]
    timeline = found.step.replay.timeline
    problem = master.build(timeline, [options[n] for n in picked], exclusive, float("inf"))
    # WHEN all that can be chosen together are replayed
    every: list[tuple[int, float, frozenset[int]]] = []
    for size in range(5):
        for chosen in itertools.combinations(range(len(picked)), size):
            if all(len(set(chosen) & set(chain)) <= 1 for chain in exclusive):
                peak = found.certified([picked[n] for n in chosen], 0, 0.0).timeline.peak_bytes
                every.append((peak, problem.seconds_of(chosen), frozenset(chosen)))
    assert any(set(chosen) & {picked.index(n) for n in with_inputs} for _, _, chosen in every)
    # THEN for every peak among them the solver's choice is as fast as the fastest within it
    for budget in sorted({peak for peak, _, _ in every})[:: max(len(every) // 25, 1)]:
        best = min(seconds for peak, seconds, _ in every if peak <= budget)
        assert _solved(problem, budget) == pytest.approx(best, rel=1e-6, abs=1e-9)


def _solved(problem: MasterProblem, budget: int) -> float:
    answer = problem.solve(budget, seconds_limit=10.0, gap_seconds=0.0)
    assert answer.feasible
    return problem.seconds_of(answer.options)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_inputs_are_fetched_for_every_backward() -> None:
    model, inputs = subject("by name").new()
    model(inputs).backward()
    expected = gradients(model)
    with applied(model, plan_with_inputs("by name")):
        loss = model(inputs)
        for keep in (True, False):
            model.zero_grad()
            loss.backward(retain_graph=keep)
            found = gradients(model)
            assert all(torch.equal(expected[name], found[name]) for name in expected)


class Twice(nn.Module):
    """A part that is called with one tensor twice, and asks whether it is."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = nn.Linear(16, 16), Mix()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        out: torch.Tensor = self.mix({"q": x, "k": [x, x.t()]}).square().mean()
        return out


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)

    def forward(self, given: dict[str, Any]) -> torch.Tensor:
        q, (k, turned) = given["q"], given["k"]
        y = nn.functional.silu(self.up(q)) if q is k else nn.functional.relu(self.up(q))
        return (y.sum(1) * (q @ turned).sum(1)).exp()


def test_one_tensor_that_is_given_twice_is_one_tensor_again() -> None:
    twice = Subject(Twice, lambda: 0.1 * torch.randn(24, 16), ())
    trace = capture(twice.build, limits=THOROUGH)
    plan = next(plans_with_inputs(planner_of(trace, SLOW, overlaps=False), 1))
    assert [region.module for region in plan.regions] == ["Twice.mix"]
    assert_same_with(twice, plan, steps=2)


def test_what_python_changes_after_the_region_is_as_it_was() -> None:
    # GIVEN an input that is overwritten between forward and backward
    plan = plan_with_inputs("in a row")
    model, inputs = subject("in a row").new()
    model(inputs).backward()
    expected = gradients(model)
    model.zero_grad()
    given: list[torch.Tensor] = []
    handle = model.parts[1].register_forward_pre_hook(lambda _, args: given.append(args[0].detach()))
    with applied(model, plan):
        loss = model(inputs)
        given[0].data.zero_()
        loss.backward()
    handle.remove()
    # THEN backward computes with what the region was called with
    found = gradients(model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_inputs_stay_where_someone_else_sees_to_what_is_saved() -> None:
    plan = plan_with_inputs("in a row")
    model, inputs = subject("in a row").new()
    model(inputs).backward()
    expected = gradients(model)
    model.zero_grad()
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    with applied(model, plan), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs).backward()
    assert packed
    found = gradients(model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


class Bent(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.tanh())


def test_a_model_that_does_something_else_computes_the_same_with_a_warning() -> None:
    plan = plan_with_inputs("in a row")
    model, inputs = subject("in a row").new()
    for part in model.parts:
        part.norm = Bent(16)
    model(inputs).backward()
    expected = gradients(model)
    model.zero_grad()
    with pytest.warns(UserWarning, match="does not do what its plan says"), applied(model, plan):
        model(inputs).backward()
    found = gradients(model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_another_batch_is_copied_as_well() -> None:
    plan = plan_with_inputs("in a row")
    model, _ = subject("in a row").new()
    for rows in (7, 40, 40):
        inputs = torch.randn(rows, 16)
        model(inputs).backward()
        expected = gradients(model)
        model.zero_grad()
        with applied(model, plan), warnings.catch_warnings():
            warnings.simplefilter("error")
            model(inputs).backward()
        found = gradients(model)
        model.zero_grad()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_file_of_a_plan_says_which_inputs(tmp_path) -> None:
    plan = plan_with_inputs("by name")
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    # an input that the step does not have is no plan for it, one of an op that is not there no plan at all
    kind = next(kind for kind in plan.kinds if kind.host_inputs)
    number = plan.kinds.index(kind)
    for place, error in (
        (InputPlace(kind.host_inputs[0].op, 9), PlanDoesNotFit),
        (InputPlace(len(kind.ops), 0), FileFormatError),
    ):
        kinds = (*plan.kinds[:number], replace(kind, host_inputs=(place,)), *plan.kinds[number + 1 :])
        broken = replace(plan, kinds=kinds)
        save_plan(broken, tmp_path / "broken.json")
        with pytest.raises(error, match="other inputs" if error is PlanDoesNotFit else "does not have"):
            replay_plan(load_plan(tmp_path / "broken.json"), traced("by name"))
