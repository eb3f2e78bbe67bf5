"""The rules of allocation and of freeing, as torch's CUDA caching allocator applies them.

Everything that happens per tensor is here, and nothing else, because it happens millions of times.
"""

from __future__ import annotations

from collections import deque

from trainfit.allocator.allocator_state import (
    LARGE_ROUNDING,
    MIN_BLOCK,
    MIN_LARGE_SEGMENT,
    NEVER,
    SMALL_SEGMENT,
    SMALL_SIZE,
    AllocatorState,
)
from trainfit.allocator.block_pools import FreeBlocks, MemoryBlock, Pool, merge, position_of
from trainfit.allocator.expandable_memory import expandable_size, grow
from trainfit.allocator.releasing import collect_garbage, release_cached, release_oversize
from trainfit.allocator.stream_table import StreamTable


def rounded_size(state: AllocatorState, size: int) -> int:
    """Return what a request counts as: a multiple of 512, or of a part of a power of two."""
    if size < MIN_BLOCK:
        return MIN_BLOCK
    if state.divisions is not None:
        exponent = size.bit_length() - 1
        divisions = state.divisions[min(max(exponent - 20, 0), len(state.divisions) - 1)]
        if divisions > 1 and size > MIN_BLOCK * divisions:
            part = (1 << exponent) // divisions
            return (size + part - 1) // part * part
    return (size + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK


def segment_size(state: AllocatorState, size: int) -> int:
    """Return how much is asked of the device for a request that no free block suits."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE_SEGMENT:
        return state.large_segment
    return (size + LARGE_ROUNDING - 1) // LARGE_ROUNDING * LARGE_ROUNDING


def allocate(state: AllocatorState, asked: int, stream: int) -> MemoryBlock | None:
    """Hand out a block for a request of `asked` bytes, or None when memory has run out."""
    if state.queues:
        process_events(state)
    size = rounded_size(state, asked)
    pool = state.small if size <= SMALL_SIZE else state.large
    block = _best_fit(state, pool, stream, size)
    if block is None:
        block = _new_memory(state, pool, stream, size)
        if block is None:
            state.num_ooms += 1
            return None
    rest = block.size - size
    if pool.small or state.expandable:
        splits = rest >= MIN_BLOCK
    else:
        splits = rest > SMALL_SIZE and size < state.max_split
    counted = block.reservation is None  # expandable segments have no inactive splits
    was_split = block.previous is not None or block.next is not None
    if splits:
        remaining = block
        block = MemoryBlock(pool, stream, size, remaining.address, state.part_age(remaining))
        block.reservation = remaining.reservation
        block.home = remaining.home
        block.insert_between(remaining.previous, remaining)
        remaining.address += size
        remaining.size = rest
        pool.insert(remaining)
        if counted:
            if was_split:
                state.inactive_split -= size
            else:
                _count_inactive_split(state, rest, 1)
    elif was_split and counted:
        _count_inactive_split(state, -block.size, -1)
    block.busy = True
    block.requested = asked
    size = block.size
    state.allocations += 1
    state.allocated += size
    if state.allocated > state.allocated_peak:
        state.allocated_peak = state.allocated
    state.active += size
    if state.active > state.active_peak:
        state.active_peak = state.active
    state.active_blocks += 1
    if state.active_blocks > state.active_blocks_peak:
        state.active_blocks_peak = state.active_blocks
    state.requested += asked
    if state.requested > state.requested_peak:
        state.requested_peak = state.requested
    return block


def free(state: AllocatorState, block: MemoryBlock) -> None:
    """Take a block back; one that other streams use stays active until their events are seen complete."""
    state.allocated -= block.size
    if block.uses is None:
        _make_free(state, block)
        return
    order = StreamTable()
    for stream in block.uses:
        order.add(stream)
    block.uses = None
    for stream in order.in_order():
        state.last_stamp += 1
        block.events += 1
        if stream not in state.queues:
            state.waiting.add(stream)
            state.queues[stream] = deque()
        state.queues[stream].append((state.last_stamp, block))


def record_stream(block: MemoryBlock, stream: int) -> None:
    """Note that a block is also used on another stream."""
    if stream != block.stream:
        if block.uses is None:
            block.uses = [stream]
        elif stream not in block.uses:
            block.uses.append(stream)


def process_events(state: AllocatorState) -> None:
    """Free the blocks whose events have completed: in each stream, up to the first that has not."""
    place = state.waiting.at_or_after(0)
    while place >= 0:
        stream = state.waiting.stream_at(place)
        queue = state.queues[stream]
        while queue and not (state.events_are_manual and queue[0][0] > state.completed_stamp):
            _finish_event(state, queue.popleft()[1])
        if queue:
            place += 1
        else:
            del state.queues[stream]
            state.waiting.remove_at(place)
        place = state.waiting.at_or_after(place)


def synchronize(state: AllocatorState) -> None:
    """Wait for all events, and free the blocks that waited for them."""
    state.num_sync_all_streams += 1
    state.completed_stamp = state.last_stamp
    process_events(state)


def empty_cache(state: AllocatorState) -> None:
    """Give back to the device whatever can be given back."""
    synchronize(state)
    release_cached(state)


def _finish_event(state: AllocatorState, block: MemoryBlock) -> None:
    block.events -= 1
    if block.events == 0:
        _make_free(state, block)


def _make_free(state: AllocatorState, block: MemoryBlock) -> None:
    """Merge a block with its free neighbours, and put it into its pool."""
    pool = block.pool
    size = block.size
    merged = 0
    blocks = 0
    before = block.previous
    if before is not None and not before.busy:
        taken = merge(pool, block, before)
        if taken:
            merged += taken
            blocks -= 1
    after = block.next
    if after is not None and not after.busy:
        taken = merge(pool, block, after)
        if taken:
            merged += taken
            blocks -= 1
    block.busy = False
    pool.insert(block)
    if block.reservation is None:
        if block.previous is not None or block.next is not None:
            _count_inactive_split(state, block.size - merged, blocks + 1)
        elif blocks:
            _count_inactive_split(state, -merged, blocks)
    state.active_blocks -= 1
    state.active -= size
    state.requested -= block.requested


def _count_inactive_split(state: AllocatorState, size: int, blocks: int) -> None:
    state.inactive_split += size
    if state.inactive_split > state.inactive_split_peak:
        state.inactive_split_peak = state.inactive_split
    state.inactive_split_blocks += blocks
    if state.inactive_split_blocks > state.inactive_split_blocks_peak:
        state.inactive_split_blocks_peak = state.inactive_split_blocks


def _best_fit(state: AllocatorState, pool: Pool, stream: int, size: int) -> MemoryBlock | None:
    """Take the first free block that is large enough out of the pool, if the rules let it be used."""
    if state.garbage_bytes >= 0:
        pool.searches += 1
    free = pool.streams.get(stream)
    if free is None:
        return None
    bucket = free.buckets.get(size)
    if bucket is None:
        at = position_of(free.sizes, size)
        if at == len(free.sizes):
            return None
        bucket = free.buckets[free.sizes[at]]
    block = bucket[0]
    if block.reservation is not None and expandable_size(block) > block.size:
        block = _least_expandable(free, block)
    if state.max_split < NEVER:
        if size < state.max_split <= block.size:
            return None
        if size >= state.max_split and block.size >= size + state.max_rounding:
            return None
    free.remove(block)
    return block


def _least_expandable(free: FreeBlocks, block: MemoryBlock) -> MemoryBlock:
    """Go on from a block that could grow while the next one would be smaller, grown as far as it goes.

    The block is the first of its size.
    """
    place = 0
    bucket = free.buckets[block.size]
    at = position_of(free.sizes, block.size)
    while True:
        place += 1
        if place == len(bucket):
            at += 1
            if at == len(free.sizes):
                return block
            bucket = free.buckets[free.sizes[at]]
            place = 0
        if expandable_size(bucket[place]) >= expandable_size(block):
            return block
        block = bucket[place]


def _new_memory(state: AllocatorState, pool: Pool, stream: int, size: int) -> MemoryBlock | None:
    """Get memory from the device, if need be after giving back what is free."""
    if state.garbage_bytes >= 0:
        collect_garbage(state)
    block = _ask_device(state, pool, stream, size)
    if block is None and state.max_split < NEVER and release_oversize(state, pool, stream, size):
        block = _ask_device(state, pool, stream, size)
    if block is None:
        empty_cache(state)
        state.num_alloc_retries += 1
        block = _ask_device(state, pool, stream, size)
    return block


def _ask_device(state: AllocatorState, pool: Pool, stream: int, size: int) -> MemoryBlock | None:
    wanted = segment_size(state, size)
    if 0 <= state.allowed < state.reserved + wanted:
        return None
    if state.expandable:
        return grow(state, pool, stream, size)
    address = state.device.malloc(wanted)
    if address < 0:
        return None
    state.num_device_alloc += 1
    state.segments += 1
    if state.segments > state.segments_peak:
        state.segments_peak = state.segments
    state.count_reserved(pool, wanted)
    return MemoryBlock(pool, stream, wanted, address, state.new_age())
