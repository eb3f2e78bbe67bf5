"""Memory of several streams: a GPU's free blocks are kept apart by stream, and what that reserves.

Torch's real allocator answers beside ours where TRAINFIT_ALLOCATOR_ORACLE names it; see
`benchmarks/allocator_cases.py`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from trainfit import Step
from trainfit.allocator import AllocationSequence, replay, sequence_text
from trainfit.allocator.device_memory import StepMemory
from trainfit.allocator.training_steps import stream_numbers
from trainfit.capturing import capture
from trainfit.costs.pricing import price_trace
from trainfit.devices.device_table import find_device
from trainfit.planning.planner import Planner
from trainfit.traces.ranks import Cluster
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import COMPUTE, Trace

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
import allocator_cases  # noqa: E402
from cluster_cases import CASES  # noqa: E402

sys.path.remove(BENCHMARKS)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
H100 = find_device("h100")
MIB = 1 << 20
ORACLES = allocator_cases.oracles()


def on_gpu(name: str, rank: int = 1) -> Trace:
    return capture(CASES[name].build, target=name, device="cuda", cluster=Cluster(4, rank))


def memory_of(trace: Trace) -> StepMemory:
    return StepMemory(simulate(trace), H100)


def on_one_stream(trace: Trace) -> Trace:
    return replace(trace, storages=tuple(replace(storage, stream=COMPUTE) for storage in trace.storages))


def two_streams() -> Step:
    """Each of two streams makes 30 MiB and lets go of it, in turn; then both at once hold 30 MiB."""
    model = nn.Linear(4, 4, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side = torch.cuda.Stream()

    def run() -> torch.Tensor:
        first = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        del first
        with torch.cuda.stream(side):
            second = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
            del second
        third = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        del third
        loss = model(torch.ones(2, 4, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model=model, optimizer=optimizer, run=run)


def test_a_block_that_one_stream_freed_is_not_used_by_another() -> None:
    trace = capture(two_streams, device="cuda")
    large = [storage for storage in trace.storages if storage.bytes == 30 * MIB]
    assert [storage.stream for storage in large] == [COMPUTE, "stream", COMPUTE]
    # Never more than 30 MiB at once, and yet a block for each stream; the third uses the first again.
    reserved = memory_of(trace).figures.reserved_peak_bytes
    assert reserved - memory_of(on_one_stream(trace)).figures.reserved_peak_bytes == 30 * MIB


def recorded_stream() -> Step:
    """A block of the main stream that a side stream uses: it is kept while the next is asked for."""
    model = nn.Linear(4, 4, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side = torch.cuda.Stream()

    def run() -> torch.Tensor:
        used = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        used.record_stream(side)
        used.record_stream(torch.cuda.current_stream())  # its own: no difference
        del used
        loss = model(torch.ones(2, 4, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model=model, optimizer=optimizer, run=run)


def test_a_recorded_stream_is_in_the_trace_and_in_what_the_allocator_is_told() -> None:
    trace = capture(recorded_stream, device="cuda")
    (used,) = (storage for storage in trace.storages if storage.bytes == 30 * MIB)
    assert (used.stream, used.also_used_on) == (COMPUTE, ("stream",))
    lines = sequence_text(memory_of(trace).sequence).splitlines()
    (asked, *_) = (line.split()[1] for line in lines if line.endswith(f" {30 * MIB}"))
    assert lines[lines.index(f"f {asked}") - 1] == f"r {asked} 1"


def test_a_recorded_block_stays_until_its_event_is_looked_at() -> None:
    """Freed, it is still active; only the next request finds that the other stream is done with it."""
    sequence = AllocationSequence()
    sequence.allocate("used", 30 * MIB)
    sequence.record_stream("used", 1)
    sequence.free("used")
    sequence.mark()
    sequence.allocate("next", 30 * MIB)
    sequence.mark()
    freed, after = (moment.statistics for moment in replay(sequence).moments)
    assert (freed.allocated, freed.active) == (0, 30 * MIB)
    assert after.reserved == 30 * MIB


@pytest.mark.parametrize("name", ["fsdp", "hsdp-bf16-reduce-fp32", "fsdp-offload", "ddp", "tp-fsdp"])
def test_steps_of_several_streams_ask_for_their_storages_where_they_were_made(name: str) -> None:
    trace = on_gpu(name)
    sequence = memory_of(trace).sequence
    asked = {(size, stream) for size, stream in zip(sequence.sizes, sequence.streams) if size}
    made = [storage for storage in trace.storages if storage.bytes and not storage.persistent]
    numbers = stream_numbers(trace)
    assert numbers[COMPUTE] == 0
    assert {(storage.bytes, numbers[storage.stream]) for storage in made} <= asked


@pytest.mark.slow
@pytest.mark.skipif(not ORACLES, reason=f"{allocator_cases.VARIABLE} names no oracle")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_torchs_own_allocator_agrees(name: str, conf: str) -> None:
    text = sequence_text(memory_of(on_gpu(name)).sequence)
    for capacity in (1 << 40, 48 * MIB):
        case = allocator_cases.AllocatorCase(text, conf, capacity, 1 << 40, None, False, False)
        theirs = allocator_cases.oracle_answer(ORACLES["2.13.0"], case)
        assert not allocator_cases.first_difference(allocator_cases.our_answer("2.13.0", case), theirs)


def test_a_plan_keeps_streams_gathered_parameters_and_what_is_waited_for() -> None:
    """A region that runs again moves all later ops; those of the step before are counted from its end."""
    trace = on_gpu("fsdp")
    planner = Planner(trace, price_trace(trace, H100))
    planned = planner.smallest().timeline.trace
    assert len(planned.ops) > len(trace.ops)
    planned.check()
    first = next(op for op in planned.ops if op.queue == "copy-in")
    (before,) = (number for number in first.waits_for if number < 0)
    assert (planned.ops[before].phase, planned.ops[before].queue) == ("optimizer", COMPUTE)
    for what in ("stream", "gathered"):
        kept = [getattr(storage, what) for storage in planned.storages[: len(trace.storages)]]
        assert kept == [getattr(storage, what) for storage in trace.storages]
