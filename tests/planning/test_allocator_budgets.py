"""On a GPU a budget is what torch's caching allocator may take: a plan that does not run in it is no plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import trainfit
from trainfit.allocator import OutOfMemory, smallest_capacity
from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.device_memory import StepMemory
from trainfit.allocator.named_options import named_options
from trainfit.costs.roofline import roofline_costs
from trainfit.devices.device_table import Device, find_device
from trainfit.errors import BudgetTooSmall, OptionError
from trainfit.planning.baselines import baselines
from trainfit.planning.planner import Planner
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

MIB = 2**20
SMALL = trainfit.StepOptions(batch=16, seq=128, set={"layers": 6})


@pytest.fixture(scope="module")
def gpu() -> Device:
    return find_device("a100-sxm-40gb")


@pytest.fixture(scope="module")
def trace(gpu: Device) -> Trace:
    return trainfit.capture("gpt2-tiny", device=gpu, options=SMALL)


@pytest.fixture(scope="module")
def planner(trace: Trace, gpu: Device) -> Planner:
    return Planner(trace, roofline_costs(trace, gpu))


@pytest.mark.parametrize("share", [0.95, 0.85, 0.75])
def test_a_plan_runs_within_its_budget(planner: Planner, share: float) -> None:
    needed = planner.nothing().memory_bytes
    budget = int(share * needed)
    found = planner.plan(budget)
    assert found.fits and found.plan.regions
    # Replayed by itself: the sequence of the step with the plan, in exactly this much memory.
    assert smallest_capacity(found.memory.sequence, total_bytes=40 * 1024 * MIB) <= budget
    assert found.promised().memory_bytes <= budget
    assert found.promised().memory_bytes > found.plan.peak_bytes


def test_what_runs_in_just_the_budget_and_not_in_more_does_not_fit() -> None:
    """Where memory is of several streams, many choices run in 700 MiB and fail in a little more."""
    device = find_device("h100-sxm-80gb")
    cluster = trainfit.Cluster(2, mesh=(("dp", 2),))
    options = trainfit.StepOptions(batch=32)
    trace = trainfit.capture("llama-tiny", device=device, cluster=cluster, options=options)
    planner = Planner(trace, roofline_costs(trace, device))
    found = planner.plan(700 * MIB)
    assert found.promised().memory_bytes <= 700 * MIB
    assert found.fits  # also when the least memory is known
    assert found.step_seconds <= planner.smallest().step_seconds


def test_the_bytes_asked_for_are_not_enough(planner: Planner, trace: Trace, gpu: Device) -> None:
    """A budget of just the peak is too small for the step as it is; without an allocator it is enough."""
    peak = simulate(trace).peak_bytes
    assert not planner.nothing(peak).fits
    assert planner.plan(peak).plan.regions
    asked_for = Planner(trace, planner.costs, allocator=None)
    assert not asked_for.plan(peak).plan.regions
    assert asked_for.plan(peak).promised().memory_bytes == peak


def test_a_frontier_is_sorted_by_what_it_needs(planner: Planner) -> None:
    plans = planner.frontier(4)
    assert len(plans) > 2
    needs = [plan.memory_bytes for plan in plans]
    times = [plan.step_seconds for plan in plans]
    assert needs == sorted(needs) and times == sorted(times, reverse=True)
    assert all(plan.memory_bytes >= plan.peak_bytes for plan in plans)


def test_a_frontier_without_time_says_so(trace: Trace, gpu: Device) -> None:
    planner = Planner(trace, roofline_costs(trace, gpu))
    assert len(planner.frontier(8, seconds_limit=0.0)) >= 2
    (warning,) = planner.warnings
    assert warning.startswith("the search ended after 0 µs, with 0 of 7 budgets")


def test_the_usual_ways_are_judged_by_what_they_need(planner: Planner) -> None:
    budget = int(0.7 * planner.nothing().memory_bytes)
    ways = {way.name: way for way in baselines(planner.step, budget)}
    assert all(way.memory_bytes > way.peak_bytes for way in ways.values())
    assert ways["greedy"].memory_bytes <= budget < ways["keep everything"].memory_bytes


def test_what_cannot_be_met_names_what_would_be_needed(trace: Trace, gpu: Device) -> None:
    with pytest.raises(BudgetTooSmall, match="The least that was found to run needs"):
        trainfit.plan(trace, device=gpu, budget="20MiB")


def test_expandable_segments_need_no_more(trace: Trace, gpu: Device) -> None:
    estimate = trainfit.estimate(trace, device=gpu)
    expandable = trainfit.estimate(trace, device=gpu, allocator="expandable")
    assert expandable.expandable_bytes is None
    assert estimate.expandable_bytes == expandable.smallest_memory_bytes
    memory = estimate.memory
    assert estimate.peak_bytes < memory.allocated_peak_bytes <= memory.reserved_peak_bytes
    assert memory.allocated_peak_bytes <= memory.smallest_memory_bytes <= memory.reserved_peak_bytes
    # cuBLAS of the forward and of the backward thread: 8.125 MiB each.
    assert sum(library.bytes for library in memory.libraries) == 16.25 * MIB
    assert memory.allocated_peak_bytes >= estimate.peak_bytes + 16.25 * MIB


def test_a_step_that_is_larger_than_the_device_has_figures_too(trace: Trace) -> None:
    tiny = Device("tiny", "cuda", 460 * MIB, architecture="sm_80")
    memory = StepMemory(simulate(trace), tiny, AllocatorOptions(expandable_segments=True))
    with pytest.raises(OutOfMemory):
        smallest_capacity(memory.sequence, memory.options, total_bytes=8 * MIB)
    assert memory.smallest_bytes > simulate(trace).peak_bytes
    assert not memory.runs_within(tiny.usable_bytes)


def test_a_step_that_no_gpu_could_hold_is_not_replayed(trace: Trace, gpu: Device) -> None:
    huge = tuple(replace(storage, bytes=storage.bytes << 24) for storage in trace.storages)
    timeline = simulate(replace(trace, storages=huge, observed_peak_bytes=None))
    assert timeline.peak_bytes > 2**50
    memory = StepMemory(timeline, gpu)
    assert memory.smallest_bytes == memory.figures.reserved_peak_bytes == timeline.peak_bytes
    assert not memory.runs_within(gpu.usable_bytes)


def test_a_cpu_takes_what_is_asked_for() -> None:
    trace = trainfit.capture("gpt2-tiny", device="cpu")
    figures = StepMemory(simulate(trace), find_device("cpu")).figures
    peak = simulate(trace).peak_bytes
    assert figures.allocated_peak_bytes == figures.reserved_peak_bytes == peak
    assert figures.smallest_memory_bytes == peak and figures.libraries == ()


# How options are named -----------------------------------------------------------------------------------


def test_names_texts_and_files_of_options(tmp_path: Path) -> None:
    expandable = AllocatorOptions(expandable_segments=True)
    assert named_options("default") == named_options(AllocatorOptions()) == AllocatorOptions()
    assert named_options("Expandable") == named_options("expandable_segments:True") == expandable
    assert named_options("none") is named_options(None) is None
    file = tmp_path / "conf.env"
    for text in ("expandable_segments:True\n", 'export PYTORCH_ALLOC_CONF="expandable_segments:True"\n'):
        file.write_text(text)
        assert named_options(str(file)) == expandable


@pytest.mark.parametrize("setting", ["", "expandible", "no/such/file", "expandable_segments=True", 3])
def test_what_is_no_setting_is_refused(setting: object) -> None:
    with pytest.raises(OptionError, match="allocator"):
        named_options(setting)  # type: ignore[arg-type]


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "conf"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="it is not text"):
        named_options(str(file))
