"""Giving memory back to the device: all that is free, oversize blocks, or what was not used for long."""

from __future__ import annotations

from trainfit.allocator.allocator_state import AllocatorState
from trainfit.allocator.block_pools import MemoryBlock, Pool
from trainfit.allocator.expandable_memory import unmap


def release_cached(state: AllocatorState) -> None:
    """Give back all free segments that are not split, and free pages of expandable ones."""
    for pool in (state.large, state.small):
        blocks = pool.in_order()
        for block in blocks:
            if block.reservation is None and block.previous is None and block.next is None:
                _release(state, block)
        for block in blocks:
            if block.reservation is not None:
                unmap(state, block)


def release_oversize(state: AllocatorState, pool: Pool, stream: int, size: int) -> bool:
    """Give back the smallest oversize block that suffices, or several from the largest down.

    Only where `max_split_size_mb` is set. Returns whether as much as the request was given back.
    """
    wanted = max(size, state.max_split)
    blocks = pool.streams[stream].in_order() if stream in pool.streams else []
    for block in blocks:
        if block.size >= wanted:
            if block.reservation is None:
                _release(state, block)
                return True
            break
    released = 0
    for block in reversed([block for block in blocks if block.size < wanted]):
        if released >= wanted or block.size < state.max_split:
            break
        if block.reservation is None:
            released += block.size
            _release(state, block)
    return released >= wanted


def collect_garbage(state: AllocatorState) -> None:
    """Give back unsplit large blocks that have waited longest, until reserved bytes are below the threshold.

    The age of a block is the number of searches since it became free. In rounds: whatever is at least as old
    as the mean goes.
    """
    if state.reserved <= state.garbage_bytes:
        return
    wanted = state.reserved - state.garbage_bytes
    pool = state.large
    ages = {
        block: pool.searches - block.free_since
        for block in pool.in_order()
        if block.previous is None and block.next is None
    }
    reclaimed = 0
    while reclaimed < wanted and ages:
        mean = sum(ages.values()) / len(ages)
        old = [block for block, age in ages.items() if age >= mean and block.reservation is None]
        if not old:
            return
        # The mean stays what it was while blocks go, so that the order within a round does not matter.
        for block in old:
            reclaimed += block.size
            del ages[block]
            _release(state, block)


def _release(state: AllocatorState, block: MemoryBlock) -> None:
    """Give a segment back whose only block is free."""
    state.device.free(block.address, block.size)
    block.pool.remove(block)
    state.num_device_free += 1
    state.segments -= 1
    state.count_reserved(block.pool, -block.size)
