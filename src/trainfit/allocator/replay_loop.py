"""The loop that runs a sequence's events through the allocator."""

from __future__ import annotations

from trainfit.allocator.allocator_state import AllocatorState
from trainfit.allocator.block_pools import MemoryBlock
from trainfit.allocator.caching_core import allocate, empty_cache, free, record_stream

ALLOCATE, FREE, RECORD, COMPLETE, EMPTY, RESET, MARK = 0, 1, 2, 3, 4, 5, 6


def run_events(
    state: AllocatorState,
    kinds: list[int],
    slots: list[int],
    sizes: list[int],
    streams: list[int],
    live: list[MemoryBlock | None],
    placements: list[int] | None,
    first: int,
) -> int:
    """Run events from `first` on; return the number of the mark, or of the failed request, where it stops.

    Returns the number of events at the end. `live` has the block of each slot that is alive; `placements`
    gets the address of every allocation.
    """
    for number in range(first, len(kinds)):
        kind = kinds[number]
        if kind == ALLOCATE:
            size = sizes[number]
            if size == 0:
                if placements is not None:
                    placements.append(0)
                continue
            block = allocate(state, size, streams[number])
            if block is None:
                return number
            live[slots[number]] = block
            if placements is not None:
                placements.append(block.address)
        elif kind == FREE:
            gone = live[slots[number]]
            if gone is not None:
                live[slots[number]] = None
                free(state, gone)
        elif kind == MARK:
            return number
        elif kind == RECORD:
            used = live[slots[number]]
            if used is not None:
                record_stream(used, streams[number])
        elif kind == COMPLETE:
            state.completed_stamp = state.last_stamp
        elif kind == EMPTY:
            empty_cache(state)
        else:
            state.reset_peaks()
    return len(kinds)
