"""Expandable segments: address space is reserved once per pool and stream, and pages are mapped as needed.

The parts that have no memory are blocks of their own, `mapped = False`. Pages are mapped for one request at a
time, all of them or none, and unmapped where a free block covers them whole.
"""

from __future__ import annotations

from trainfit.allocator.allocator_state import AllocatorState
from trainfit.allocator.block_pools import MemoryBlock, Pool, Reservation, merge


def grow(state: AllocatorState, pool: Pool, stream: int, size: int) -> MemoryBlock | None:
    """Map pages for a block of at least `size` at the lowest address possible; None if there are not enough.

    What was mapped before a failure stays mapped, and free.
    """
    block = _lowest_room(state, pool, stream, size)
    if not block.mapped and not _map(state, block, min(block.size, size)):
        return None
    while block.size < size:
        following = block.next
        # None: a request that is larger than the address space, which is larger than the device.
        if following is None or not _map(state, following, min(size - block.size, following.size)):
            return None
        block = following
    pool.remove(block)
    return block


def expandable_size(block: MemoryBlock) -> int:
    """Return how large a free block is with the unmapped space after it."""
    following = block.next
    return block.size if following is None or following.mapped else block.size + following.size


def unmap(state: AllocatorState, block: MemoryBlock) -> None:
    """Give back the pages that lie inside of a free block; what is left of it stays free."""
    reservation = block.reservation
    assert reservation is not None
    page = reservation.page
    offset = block.address - reservation.address
    first = -(-offset // page)
    pages = (offset + block.size) // page - first
    if pages <= 0:
        return
    pool = block.pool
    pool.remove(block)
    state.device.release(pages, page)
    begin = reservation.address + first * page
    size = pages * page
    if begin > block.address:
        before = _piece(state, block, block.address, begin - block.address)
        before.insert_between(block.previous, block)
        pool.insert(before)
    if block.address + block.size > begin + size:
        after = _piece(state, block, begin + size, block.address + block.size - begin - size)
        after.insert_between(block, block.next)
        pool.insert(after)
    block.address = begin
    block.size = size
    block.mapped = False
    merge(pool, block, block.previous)
    merge(pool, block, block.next)
    pool.insert_unmapped(block)
    state.count_reserved(pool, -size)
    state.num_device_free += 1
    if block.previous is None and block.next is None:
        pool.remove_unmapped(block)  # nothing of it is mapped: the address space is given back


def _lowest_room(state: AllocatorState, pool: Pool, stream: int, size: int) -> MemoryBlock:
    """Return the first block of free and unmapped ones in a row that have room for the request."""
    for unmapped in pool.unmapped.get(stream, []):
        first = unmapped
        if first.previous is not None and not first.previous.busy:
            first = first.previous
        room = 0
        block: MemoryBlock | None = first
        while block is not None and room < size and not block.busy:
            room += block.size
            block = block.next
        if room >= size:
            return first
    page = pool.page
    space = -(-(state.device.total + state.device.total // 8) // page) * page
    reservation = Reservation(state.device.reserve(space), space, page)
    new = MemoryBlock(pool, stream, space, reservation.address, state.new_age())
    new.mapped = False
    new.reservation = reservation
    pool.insert_unmapped(new)
    return new


def _map(state: AllocatorState, block: MemoryBlock, size: int) -> bool:
    """Map the first `size` bytes of unmapped space, in whole pages, and merge them with free neighbours."""
    pool = block.pool
    pages = -(-size // pool.page)
    if not state.device.create(pages, pool.page):
        return False
    size = pages * pool.page
    pool.remove_unmapped(block)
    block.mapped = True
    if size < block.size:
        rest = _piece(state, block, block.address + size, block.size - size)
        rest.mapped = False
        rest.insert_between(block, block.next)
        pool.insert_unmapped(rest)
        block.size = size
    merge(pool, block, block.previous)
    merge(pool, block, block.next)
    pool.insert(block)
    state.count_reserved(pool, size)
    state.num_device_alloc += 1
    return True


def _piece(state: AllocatorState, whole: MemoryBlock, address: int, size: int) -> MemoryBlock:
    piece = MemoryBlock(whole.pool, whole.stream, size, address, state.part_age(whole))
    piece.reservation = whole.reservation
    return piece
