"""Replaying a sequence: what it needs, and whether it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.caching_allocator import (
    AllocatorStatistics,
    new_state,
    out_of_memory_text,
    statistics_of,
)
from trainfit.allocator.event_sequence import AllocationSequence
from trainfit.allocator.fast_core import AllocatorState, MemoryBlock, run_events
from trainfit.allocator.replay_loop import ALLOCATE, MARK

UNLIMITED = 16 << 40
"""Bytes of a device on which nothing that is of interest runs out of memory."""


@dataclass(frozen=True)
class MarkedMoment:
    """The statistics at a mark (`kind` is "mark") or where a request failed ("oom", with torch's message)."""

    kind: str
    event: int
    statistics: AllocatorStatistics
    message: str = ""


@dataclass(frozen=True)
class AllocatorReplay:
    """What became of a sequence: the statistics at its end, or where it ran out of memory.

    `failed_event` is the number of the first request that could not be served, None if all were.
    """

    statistics: AllocatorStatistics
    failed_event: int | None
    moments: tuple[MarkedMoment, ...] = ()
    placements: tuple[int, ...] = field(default=(), repr=False)

    @property
    def out_of_memory(self) -> bool:
        """Whether a request could not be served."""
        return self.failed_event is not None

    @property
    def allocated_peak_bytes(self) -> int:
        """The most that was handed out at once, in whole blocks."""
        return self.statistics.allocated_peak

    @property
    def requested_peak_bytes(self) -> int:
        """The most that was asked for at once."""
        return self.statistics.requested_peak

    @property
    def reserved_peak_bytes(self) -> int:
        """The most that the allocator held of the device."""
        return self.statistics.reserved_peak

    @property
    def retries(self) -> int:
        """How often everything that was free had to be given back before a request could be served."""
        return self.statistics.num_alloc_retries


def replay(
    sequence: AllocationSequence,
    options: AllocatorOptions | None = None,
    capacity_bytes: int = UNLIMITED,
    *,
    total_bytes: int | None = None,
    fraction: float | None = None,
    manual_events: bool = False,
    keep_going: bool = False,
    keep_placements: bool = False,
) -> AllocatorReplay:
    """Run a sequence on a device of that capacity; it ends where memory runs out, unless it is to keep going.

    The other arguments are those of `CachingAllocator`. With `keep_placements` the result has the address of
    every allocation that was served, in order.
    """
    state = new_state(capacity_bytes, options or AllocatorOptions(), total_bytes, fraction)
    state.events_are_manual = manual_events
    placements: list[int] | None = [] if keep_placements else None
    moments = tuple(_moments(state, sequence, placements, keep_going))
    failed = [moment.event for moment in moments if moment.kind == "oom"]
    return AllocatorReplay(
        statistics_of(state), failed[0] if failed else None, moments, tuple(placements or ())
    )


def run_to_end(state: AllocatorState, sequence: AllocationSequence) -> int | None:
    """Run a whole sequence, and return the number of the request that could not be served, if any."""
    live: list[MemoryBlock | None] = [None] * len(sequence.names)
    number = -1
    while True:
        number = _run(state, sequence, live, None, number + 1)
        if number == len(sequence):
            return None
        if sequence.kinds[number] == ALLOCATE:
            return number


def _moments(
    state: AllocatorState, sequence: AllocationSequence, placements: list[int] | None, keep_going: bool
) -> Iterator[MarkedMoment]:
    live: list[MemoryBlock | None] = [None] * len(sequence.names)
    number = -1
    while True:
        number = _run(state, sequence, live, placements, number + 1)
        if number == len(sequence):
            return
        if sequence.kinds[number] == MARK:
            yield MarkedMoment("mark", number, statistics_of(state))
        else:
            assert sequence.kinds[number] == ALLOCATE
            text = out_of_memory_text(state, sequence.sizes[number])
            yield MarkedMoment("oom", number, statistics_of(state), text)
            if not keep_going:
                return


def _run(
    state: AllocatorState,
    sequence: AllocationSequence,
    live: list[MemoryBlock | None],
    placements: list[int] | None,
    first: int,
) -> int:
    return run_events(
        state, sequence.kinds, sequence.slots, sequence.sizes, sequence.streams, live, placements, first
    )
