"""Blocks of device memory, and the pools that keep the free ones in the order in which they are handed out.

A segment is a chain of blocks without gaps. The free blocks of a pool and stream are ordered by size, and
those of one size by rank: the age of the segment and the address, or what the torch version in question
compares instead. A rank is one integer, because comparing integers is cheap.
"""

from __future__ import annotations


def position_of(sizes: list[int], size: int) -> int:
    """Return where a size is in a sorted list, or would be."""
    low = 0
    high = len(sizes)
    while low < high:
        middle = (low + high) >> 1
        if sizes[middle] < size:
            low = middle + 1
        else:
            high = middle
    return low


class Reservation:
    """Address space of an expandable segment, which physical pages are mapped into."""

    def __init__(self, address: int, size: int, page: int) -> None:
        """Keep where it is; `page` is how much is mapped at once."""
        self.address = address
        self.size = size
        self.page = page


class MemoryBlock:
    """A part of a segment: handed out, waiting for other streams, free, or address space without memory."""

    __slots__ = (
        "address",
        "age",
        "busy",
        "events",
        "free_since",
        "home",
        "mapped",
        "next",
        "pool",
        "previous",
        "requested",
        "reservation",
        "size",
        "stream",
        "uses",
    )

    def __init__(self, pool: Pool, stream: int, size: int, address: int, age: int) -> None:
        """Make a block that belongs to no chain yet."""
        self.pool = pool
        self.stream = stream
        self.size = size
        self.address = address
        self.age = age
        self.requested = 0
        self.busy = False  # handed out, or waiting for events
        self.mapped = True
        self.events = 0
        self.uses: list[int] | None = None  # other streams, in the order in which they were recorded
        self.free_since = 0  # searches of the pool, when the block became free
        self.home: FreeBlocks | None = None  # where it is when it is free
        self.previous: MemoryBlock | None = None
        self.next: MemoryBlock | None = None
        self.reservation: Reservation | None = None

    def insert_between(self, before: MemoryBlock | None, after: MemoryBlock | None) -> None:
        """Make this block the one between two neighbours."""
        if before is not None:
            before.next = self
        self.previous = before
        if after is not None:
            after.previous = self
        self.next = after


class FreeBlocks:
    """The free blocks of one pool and stream, by size and rank."""

    __slots__ = ("buckets", "sizes")

    def __init__(self) -> None:
        """Start empty."""
        self.sizes: list[int] = []  # those in `buckets`, in order
        self.buckets: dict[int, list[MemoryBlock]] = {}  # by rank; never empty

    def remove(self, block: MemoryBlock) -> None:
        """Take a certain block out."""
        size = block.size
        bucket = self.buckets[size]
        if len(bucket) == 1:
            del self.buckets[size]
            del self.sizes[position_of(self.sizes, size)]
        elif bucket[0] is block:
            del bucket[0]
        else:
            bucket.remove(block)

    def in_order(self) -> list[MemoryBlock]:
        """Return all of them, as they are handed out."""
        return [block for size in self.sizes for block in self.buckets[size]]


class Pool:
    """The small or the large pool: free blocks of all streams, and what is reserved for it."""

    __slots__ = (
        "page",
        "rank_shift",
        "reserved",
        "reserved_peak",
        "searches",
        "small",
        "streams",
        "unmapped",
    )

    def __init__(self, small: bool, page: int, rank_shift: int) -> None:
        """Start empty; an address counts in ranks without its lowest `rank_shift` bits."""
        self.small = small
        self.page = page  # of expandable segments
        self.rank_shift = rank_shift
        self.reserved = 0
        self.reserved_peak = 0
        self.searches = 0  # counted only while garbage is collected
        self.streams: dict[int, FreeBlocks] = {}
        self.unmapped: dict[int, list[MemoryBlock]] = {}  # by address, of each stream

    def insert(self, block: MemoryBlock) -> None:
        """Put a free block where it belongs."""
        block.free_since = self.searches
        free = block.home
        if free is None:
            free = self.streams.get(block.stream)
            if free is None:
                free = self.streams[block.stream] = FreeBlocks()
            block.home = free
        size = block.size
        bucket = free.buckets.get(size)
        if bucket is None:
            free.buckets[size] = [block]
            free.sizes.insert(position_of(free.sizes, size), size)
            return
        shift = self.rank_shift
        rank = block.age + (block.address >> shift)
        low = 0
        high = len(bucket)
        while low < high:
            middle = (low + high) >> 1
            other = bucket[middle]
            if other.age + (other.address >> shift) < rank:
                low = middle + 1
            else:
                high = middle
        bucket.insert(low, block)

    def remove(self, block: MemoryBlock) -> None:
        """Take a certain free block out."""
        self.streams[block.stream].remove(block)

    def in_order(self) -> list[MemoryBlock]:
        """Return the free blocks of all streams, stream by stream."""
        return [block for stream in sorted(self.streams) for block in self.streams[stream].in_order()]

    def insert_unmapped(self, block: MemoryBlock) -> None:
        """Put address space without memory where it belongs."""
        blocks = self.unmapped.setdefault(block.stream, [])
        at = len(blocks)
        while at > 0 and blocks[at - 1].address > block.address:
            at -= 1
        blocks.insert(at, block)

    def remove_unmapped(self, block: MemoryBlock) -> None:
        """Take address space out, which is mapped now or gone."""
        self.unmapped[block.stream].remove(block)


def merge(pool: Pool, block: MemoryBlock, neighbour: MemoryBlock | None) -> int:
    """Make a free neighbour a part of the block, and return how large it was; 0 if it is not free."""
    if neighbour is None or neighbour.busy or neighbour.mapped != block.mapped:
        return 0
    home = neighbour.home
    if neighbour.mapped and home is not None:
        home.remove(neighbour)
    else:
        pool.remove_unmapped(neighbour)
    if block.previous is neighbour:
        block.address = neighbour.address
        before = neighbour.previous
        block.previous = before
        if before is not None:
            before.next = block
    else:
        after = neighbour.next
        block.next = after
        if after is not None:
            after.previous = block
    block.size += neighbour.size
    # The chain would keep merged blocks alive otherwise: reference cycles are only freed by the collector.
    neighbour.previous = neighbour.next = None
    return neighbour.size
