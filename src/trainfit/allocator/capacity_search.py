"""The smallest capacity with which a sequence runs: bisection over pages of 2 MiB, with few replays.

More memory need not help: a larger capacity changes what is released, and so where things are. To give one
answer all the same, the capacities are tried that plain bisection would try, between nothing and what is
reserved with unlimited memory. What is known already is not replayed:

- A capacity below the bytes that are asked for at once cannot run.
- A replay that held at most U bytes, and whose smallest refused request would have made it F, is the same
  with every capacity from U on and below F. (Not if address space or a fraction follow the capacity.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.caching_allocator import OutOfMemory, new_state, out_of_memory_text, statistics_of
from trainfit.allocator.event_sequence import AllocationSequence
from trainfit.allocator.fast_core import AllocatorState
from trainfit.allocator.replay_loop import RECORD
from trainfit.allocator.sequence_replay import UNLIMITED, run_to_end
from trainfit.allocator.stand_in_device import PAGE


@dataclass(frozen=True)
class CapacitySearch:
    """What a search found, in bytes; the peaks are those with unlimited memory.

    `probes` counts the capacities that were looked at; most of them are known without a replay.
    """

    allocated_peak: int
    reserved_peak: int
    min_capacity: int
    min_capacity_retries: int
    min_capacity_without_retries: int
    highest_failing_capacity_seen: int
    probes: int


@dataclass(frozen=True)
class _Outcome:
    """How a replay ended, and the capacities, in bytes, that would have made no difference."""

    runs: bool
    retries: int
    lowest: int
    below: int


def smallest_capacity(
    sequence: AllocationSequence,
    options: AllocatorOptions | None = None,
    limit_bytes: int = UNLIMITED,
    *,
    total_bytes: int | None = None,
    fraction: float | None = None,
    manual_events: bool = False,
) -> int:
    """Return the smallest capacity, in bytes and whole pages of 2 MiB, with which a sequence runs.

    The other arguments are those of `CachingAllocator`; pass `total_bytes` with expandable segments, whose
    address space depends on it. Raises `OutOfMemory` if it does not run in `limit_bytes`.
    """
    probes = _CapacityProbes(sequence, options or AllocatorOptions(), total_bytes, fraction, manual_events)
    probes.run_unlimited(limit_bytes)
    return _smallest(probes)[0] * PAGE


def search_capacity(
    sequence: AllocationSequence,
    options: AllocatorOptions | None = None,
    limit_bytes: int = UNLIMITED,
    *,
    total_bytes: int | None = None,
    fraction: float | None = None,
    manual_events: bool = False,
) -> CapacitySearch:
    """Return the smallest capacity, and the smallest that needs no retry, with what else there is to say."""
    probes = _CapacityProbes(sequence, options or AllocatorOptions(), total_bytes, fraction, manual_events)
    free_run = probes.run_unlimited(limit_bytes)
    smallest, failing = _smallest(probes)
    calm = _bisect(
        smallest - 1, -(-free_run.reserved_peak // PAGE), lambda pages: _is_calm(probes.outcome(pages))
    )
    return CapacitySearch(
        allocated_peak=free_run.allocated_peak,
        reserved_peak=free_run.reserved_peak,
        min_capacity=smallest * PAGE,
        min_capacity_retries=probes.outcome(smallest, counted=False).retries,
        min_capacity_without_retries=calm[0] * PAGE,
        highest_failing_capacity_seen=failing * PAGE,
        probes=probes.count,
    )


class _CapacityProbes:
    """Replays of one sequence with several capacities; what is known is not replayed."""

    def __init__(
        self,
        sequence: AllocationSequence,
        options: AllocatorOptions,
        total_bytes: int | None,
        fraction: float | None,
        manual_events: bool,
    ) -> None:
        self.sequence = sequence
        self.count = 0
        self.replays = 0
        self.most = 0  # pages with which nothing is refused
        self._options = options
        self._total = total_bytes
        self._fraction = fraction
        self._manual_events = manual_events
        self._known: list[_Outcome] = []
        self._least = 0
        follows = (
            options.expandable_segments or fraction is not None or options.per_process_memory_fraction < 1
        )
        self._remembers = total_bytes is not None or not follows

    def run_unlimited(self, limit_bytes: int) -> AllocatorState:
        """AllocatorReplay with the limit as the capacity, and return how it ended."""
        self.count += 1
        state, failed = self._replay(limit_bytes)
        if failed is not None:
            sequence = self.sequence
            size = sequence.sizes[failed]
            raise OutOfMemory(
                out_of_memory_text(state, size),
                sequence.names[sequence.slots[failed]],
                size,
                sequence.streams[failed],
                statistics_of(state),
            )
        self.most = -(-state.reserved_peak // PAGE)
        if RECORD not in self.sequence.kinds:  # otherwise some of it may be waiting for streams
            self._least = state.requested_peak
        return state

    def outcome(self, pages: int, counted: bool = True) -> _Outcome:
        """Return how a replay with so many pages ends."""
        self.count += counted
        capacity = pages * PAGE
        if capacity < self._least:
            return _Outcome(False, 0, capacity, capacity + 1)
        for known in self._known:
            if known.lowest <= capacity < known.below:
                return known
        self._replay(capacity)
        return self._known[-1]

    def _replay(self, capacity: int) -> tuple[AllocatorState, int | None]:
        self.replays += 1
        state = new_state(capacity, self._options, self._total, self._fraction)
        state.events_are_manual = self._manual_events
        failed = run_to_end(state, self.sequence)
        device = state.device
        lowest, below = capacity, capacity + 1
        if self._remembers:
            lowest = device.held_peak
            below = device.smallest_refusal if device.smallest_refusal >= 0 else 1 << 62
        self._known.append(_Outcome(failed is None, state.num_alloc_retries, lowest, below))
        return state, failed


def _smallest(probes: _CapacityProbes) -> tuple[int, int]:
    return _bisect(0, probes.most, lambda pages: probes.outcome(pages).runs)


def _is_calm(outcome: _Outcome) -> bool:
    return outcome.runs and outcome.retries == 0


def _bisect(low: int, high: int, good: Callable[[int], bool]) -> tuple[int, int]:
    """Return neighbours of which the first is good and the second, one below, is not.

    `low` counts as not good; `high` is raised until it is good: with a memory fraction or with garbage
    collection, what is reserved with unlimited memory need not do.
    """
    while not good(high):
        high += high // 8 + 1
    while high - low > 1:
        middle = (low + high) // 2
        if good(middle):
            high = middle
        else:
            low = middle
    return high, low
