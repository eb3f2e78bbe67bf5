"""Choices that the allocator is asked about without their traces: the same answers, and better plans."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from rich.console import Console

import trainfit
from trainfit.allocator import AllocationSequence
from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.device_memory import StepMemory
from trainfit.allocator.replay_loop import ALLOCATE, FREE
from trainfit.allocator.step_columns import columns_of
from trainfit.allocator.training_steps import Request as Block
from trainfit.allocator.training_steps import TrainingSteps
from trainfit.api import choose
from trainfit.api.request import Request
from trainfit.costs.roofline import roofline_costs
from trainfit.devices.device_table import Device, find_device
from trainfit.devices.library_handles import library_workspaces
from trainfit.errors import BudgetTooSmall
from trainfit.planning.baselines import baselines
from trainfit.planning.effects import Effect
from trainfit.planning.planned_columns import PlannedColumns
from trainfit.planning.planner import Planner
from trainfit.planning.rewrite import rewritten
from trainfit.planning.trials import Trials
from trainfit.planning.uniform_choices import Combination
from trainfit.report import json_result
from trainfit.report.reading import plan_data
from trainfit.report.text_plans import plan_view
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

STEPS = 5


@pytest.fixture(scope="module")
def gpu() -> Device:
    return find_device("a100-sxm-40gb")


@pytest.fixture(scope="module")
def trace(gpu: Device) -> Trace:
    options = trainfit.StepOptions(batch=16, seq=128, set={"layers": 6})
    return trainfit.capture("gpt2-tiny", device=gpu, options=options)


@pytest.fixture(scope="module")
def planner(trace: Trace, gpu: Device) -> Planner:
    return Planner(trace, roofline_costs(trace, gpu))


def choices(planner: Planner) -> list[Combination]:
    """Return choices of all kinds: by price, varied, and the solver's."""
    assert planner.trials is not None
    made = planner.trials.choices
    found = list(made.by_price)
    found += [one for uniform in made.by_price[-4:] for one in made.variations(uniform)]
    peak, least = planner.nothing().peak_bytes, planner.smallest().peak_bytes
    for share in (0.2, 0.35, 0.5, 0.65, 0.8):
        solved = planner.problem.solve(
            round(least + share * (peak - least)), seconds_limit=2.0, gap_seconds=0.0
        )
        found.append(made.combination([planner.problem.options[number] for number in solved.options]))
    return found


def as_requests(sequence: AllocationSequence) -> list[Block]:
    """Return a sequence with its blocks numbered as they are made; 0 bytes where one is freed."""
    found: list[Block] = []
    alive: dict[int, int] = {}
    for kind, slot, size in zip(sequence.kinds, sequence.slots, sequence.sizes):
        if kind == ALLOCATE:
            alive[slot] = sum(size > 0 for _, size in found)
            found.append((alive[slot], size))
        elif kind == FREE:
            found.append((alive.pop(slot), 0))
    return found


def one_by_one(trace: Trace, gpu: Device, steps: int = STEPS) -> list[Block]:
    training = TrainingSteps(trace, library_workspaces(trace, gpu))
    parts: Iterable[list[Block]] = (
        training.before(),
        training.first(),
        *[training.next() for _ in range(1, steps)],
    )
    return [request for part in parts for request in part]


def test_columns_ask_for_what_the_steps_ask_for_one_by_one(trace: Trace, gpu: Device) -> None:
    columns = columns_of(trace, library_workspaces(trace, gpu))
    assert columns is not None
    assert as_requests(columns.sequence(2)) == one_by_one(trace, gpu, 2)


def test_gradients_that_a_step_leaves_are_freed_in_the_next(gpu: Device) -> None:
    import torch

    def build() -> trainfit.Step:
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
        optimizer = torch.optim.AdamW(model.parameters())
        data = torch.randn(32, 64)

        def run() -> torch.Tensor:
            optimizer.zero_grad()  # at the beginning: the gradients of the step before
            loss: torch.Tensor = model(data).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return trainfit.Step(model=model, optimizer=optimizer, run=run)

    captured = trainfit.capture(build, device=gpu)
    assert any(storage.persistent and storage.end is not None for storage in captured.storages)
    columns = columns_of(captured, library_workspaces(captured, gpu))
    assert columns is not None
    assert as_requests(columns.sequence(STEPS)) == one_by_one(captured, gpu)


@pytest.fixture(scope="module")
def rank(gpu: Device) -> Trace:
    """FSDP gives storages of gathered parameters their memory and takes it back."""
    options = trainfit.StepOptions(batch=16, seq=128)
    cluster = trainfit.Cluster(world_size=4, mesh=(("fsdp", 4),))
    return trainfit.capture("llama-tiny", device=gpu, options=options, cluster=cluster)


def test_columns_of_gathered_parameters(rank: Trace, gpu: Device) -> None:
    columns = columns_of(rank, library_workspaces(rank, gpu))
    assert columns is not None
    filled = columns.fillings[1] - columns.fillings[0]
    # Each is filled and emptied again, once or several times.
    assert filled == sum(len(storage.resizes) for storage in rank.storages) / 2 > 0
    assert as_requests(columns.sequence(STEPS)) == one_by_one(rank, gpu)


def test_columns_of_gathered_parameters_under_plans(rank: Trace, gpu: Device) -> None:
    sharded = Planner(rank, roofline_costs(rank, gpu))
    columns, tried = PlannedColumns(rank, gpu), choices(sharded)
    assert len(tried) > 10
    for choice in tried:
        planned, written = columns.of(choice.effects), rewritten(rank, choice.effects)
        assert planned is not None
        assert as_requests(planned.sequence(2)) == one_by_one(written, gpu, 2)
        assert planned.least_peak_bytes <= simulate(written).peak_bytes
        # What is gathered stays so in the trace of the plan.
        assert sum(s.gathered for s in written.storages) == sum(s.gathered for s in rank.storages) > 0


def test_a_plan_for_a_rank_of_a_gpu_cluster(rank: Trace, gpu: Device) -> None:
    planner = Planner(rank, roofline_costs(rank, gpu))
    nothing, smallest = planner.nothing(), planner.smallest()
    budget = (nothing.memory_bytes + smallest.memory_bytes) // 2
    found = trainfit.plan(rank, budget=budget, device=gpu)
    assert found.regions and found.cluster == rank.cluster
    assert found.memory_bytes <= found.budget_bytes < nothing.memory_bytes
    assert found.step_seconds >= nothing.step_seconds


def test_what_changes_its_size_has_no_columns(trace: Trace) -> None:
    first = replace(trace.storages[0], resizes=((1, 8),))
    assert columns_of(replace(trace, storages=(first, *trace.storages[1:]))) is None


def test_columns_of_a_plan_are_those_of_its_trace(planner: Planner, trace: Trace, gpu: Device) -> None:
    columns = PlannedColumns(trace, gpu)
    tried = choices(planner)
    assert len(tried) > 10
    for choice in tried:
        planned, written = columns.of(choice.effects), rewritten(trace, choice.effects)
        again = columns_of(written, library_workspaces(written, gpu))
        assert planned is not None and again is not None
        assert as_requests(planned.sequence(2)) == as_requests(again.sequence(2))
        assert planned.least_peak_bytes <= simulate(written).peak_bytes


def test_a_trial_answers_as_the_certificate_does(planner: Planner) -> None:
    trials = Trials(planner.step, AllocatorOptions(), planner.trials.columns)  # type: ignore[union-attr]
    budget = round(0.85 * planner.nothing().memory_bytes)
    answers = set()
    for choice in choices(planner):
        memory = StepMemory(simulate(rewritten(planner.trace, choice.effects)), planner.costs.device)
        assert trials.run(choice.effects, budget) == memory.runs_within(budget)
        assert trials.needed_bytes(choice.effects) == memory.smallest_bytes
        answers.add(trials.run(choice.effects, budget))
    assert answers == {True, False}


@pytest.mark.parametrize("share", [0.9, 0.85, 0.75, 0.7])
def test_no_choice_that_treats_layers_alike_is_better(planner: Planner, share: float) -> None:
    """The solver's answers for less and less, which came before, were those of full recomputation here."""
    assert planner.trials is not None
    budget = round(share * planner.nothing().memory_bytes)
    found = planner.plan(budget)
    assert found.fits
    trials = Trials(planner.step, AllocatorOptions(), planner.trials.columns)
    running = [one for one in planner.trials.choices.by_price if trials.run(one.effects, budget)]
    assert running
    fastest = min(planner.trials.certified(one, budget, 0.0).step_seconds for one in running)
    assert found.step_seconds <= fastest
    greedy = {way.name: way for way in baselines(planner.step, budget)}["greedy"]
    assert greedy.memory_bytes > budget or found.step_seconds <= greedy.step_seconds


def test_more_memory_never_costs_time(trace: Trace, gpu: Device) -> None:
    planner = Planner(trace, roofline_costs(trace, gpu))
    needed = planner.nothing().memory_bytes
    budgets = [round(share * needed) for share in (0.7, 0.701, 0.702, 0.75, 0.8, 0.803, 0.9, 0.97)]
    seconds = [planner.plan(budget).step_seconds for budget in budgets]
    assert seconds == sorted(seconds, reverse=True)


def test_what_is_not_of_the_problem_can_be_chosen(planner: Planner) -> None:
    """A variation keeps less than the choice that it is made of, and costs more."""
    assert planner.trials is not None
    # On a device that never waits for the host: otherwise nothing is kept here, and there is nothing to vary.
    made = replace(planner.trials.choices, problem=replace(planner.problem, spare_seconds=math.inf))
    keeping = [one for one in made.by_price if any(o.effects[0].choice.bytes for o in one.options)]
    varied = [(one, variation) for one in keeping for variation in made.variations(one)]
    assert varied
    for one, variation in varied:
        assert kept(variation.effects) < kept(one.effects)
        assert len(variation.options) == len(one.options)
        assert sum(o.seconds for o in variation.options) >= sum(o.seconds for o in one.options)


def kept(effects: list[Effect]) -> int:
    return sum(effect.choice.bytes for effect in effects)


# What a setting of the allocator would be worth -------------------------------------------------------------


def test_a_faster_plan_with_expandable_segments_is_named(planner: Planner, trace: Trace, gpu: Device) -> None:
    budget = round(0.97 * planner.nothing().memory_bytes)
    found = planner.plan(budget)
    faster = planner.expandable(found)
    assert faster is not None
    assert faster.step_seconds < found.step_seconds - 0.01 * planner.step.step_seconds
    # It is a plan for that setting: the planner that has it finds one at least about as fast.
    expandable = Planner(trace, planner.costs, AllocatorOptions(expandable_segments=True))
    own = expandable.plan(budget)
    assert own.fits and own.step_seconds <= 1.01 * faster.step_seconds
    assert expandable.expandable(own) is None
    assert Planner(trace, planner.costs, None).expandable(found) is None


def test_where_nothing_fits_the_setting_that_would_do_is_named(
    planner: Planner, trace: Trace, gpu: Device
) -> None:
    budget = round(0.65 * planner.nothing().memory_bytes)
    assert not planner.plan(budget).fits
    with pytest.raises(BudgetTooSmall, match="expandable_segments:True a plan fits and adds"):
        trainfit.plan(trace, device=gpu, budget=budget)
    assert trainfit.plan(trace, device=gpu, budget=budget, allocator="expandable").regions


def test_the_line_and_the_key_about_expandable_segments(trace: Trace, gpu: Device) -> None:
    needed = StepMemory(simulate(trace), gpu).smallest_bytes
    result = choose.plan_step(Request(trace, gpu), budget=round(0.97 * needed))
    assert result.expandable is not None and result.expandable_added is not None
    data = plan_data(result)
    written = json_result.result_json(data)["expandable"]
    assert written == {
        "step_seconds": result.expandable.step_seconds,
        "added": result.expandable_added,
    }
    console = Console(width=100)
    with console.capture() as captured:
        console.print(plan_view(data))
    shown = " ".join(captured.get().split())
    assert f"a plan adds {result.expandable_added:.1%} instead of {data.added:.1%} (predicted)" in shown
    enough = choose.plan_step(Request(trace, gpu), budget=needed)
    assert enough.expandable is None and plan_data(enough).expandable is None
    assert json_result.result_json(plan_data(enough))["expandable"] is None
