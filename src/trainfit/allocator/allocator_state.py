"""What the allocator knows at one moment: its rules as numbers, its pools, its device and its counters.

The rules are in `caching_core.py` (allocate, free), `expandable_memory.py` and `releasing.py`, which all
change one state. Names of counters are those of the statistics that they become.
"""

from __future__ import annotations

from collections import deque

from trainfit.allocator.block_pools import MemoryBlock, Pool
from trainfit.allocator.stand_in_device import StandInDevice
from trainfit.allocator.stream_table import StreamTable

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20
SMALL_SEGMENT = 2 << 20
MIN_LARGE_SEGMENT = 10 << 20
LARGE_ROUNDING = 2 << 20
NEVER = 1 << 60
"""A size that no block has."""

# Which blocks of the same size come first, by torch version.
BY_ADDRESS, BY_BLOCK, BY_SEGMENT = 0, 1, 2
ADDRESS_BITS = 44  # of an address without its lowest nine bits


class AllocatorState:
    """Rules, pools, device and counters of one simulated allocator."""

    def __init__(self, device: StandInDevice, order: int, large_segment: int) -> None:
        """Start with nothing allocated."""
        self.device = device
        self.order = order
        self.large_segment = large_segment
        self.expandable = False
        self.max_split = NEVER
        self.max_rounding = NEVER  # how much larger than asked for an oversize block may be
        self.allowed = -1  # bytes that may be reserved; -1: no limit
        self.garbage_bytes = -1  # reserved bytes above which garbage is collected; -1: never
        self.divisions: list[int] | None = None  # of powers of two, by their logarithm
        rank_shift = 62 if order == BY_BLOCK else 9
        self.small = Pool(True, SMALL_SEGMENT, rank_shift)
        self.large = Pool(False, large_segment, rank_shift)
        self.next_age = 0
        self.events_are_manual = False
        self.last_stamp = 0
        self.completed_stamp = 0
        self.waiting = StreamTable()
        self.queues: dict[
            int, deque[tuple[int, MemoryBlock]]
        ] = {}  # events by stream, as `waiting` orders them
        self._set_counters()

    def _set_counters(self) -> None:
        self.allocated = self.allocated_peak = 0
        self.requested = self.requested_peak = 0
        self.active = self.active_peak = 0
        self.active_blocks = self.active_blocks_peak = 0
        self.inactive_split = self.inactive_split_peak = 0
        self.inactive_split_blocks = self.inactive_split_blocks_peak = 0
        self.reserved = self.reserved_peak = 0
        self.segments = self.segments_peak = 0
        self.allocations = 0
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_device_alloc = 0
        self.num_device_free = 0
        self.num_sync_all_streams = 0

    def reset_peaks(self) -> None:
        """Let every peak be what there is now, but for the device's."""
        self.allocated_peak = self.allocated
        self.requested_peak = self.requested
        self.active_peak = self.active
        self.active_blocks_peak = self.active_blocks
        self.inactive_split_peak = self.inactive_split
        self.inactive_split_blocks_peak = self.inactive_split_blocks
        self.reserved_peak = self.reserved
        self.segments_peak = self.segments
        self.small.reserved_peak = self.small.reserved
        self.large.reserved_peak = self.large.reserved

    def new_age(self) -> int:
        """Return the age of a new segment, in the units of ranks; 0 where only addresses count."""
        if self.order == BY_ADDRESS:
            return 0
        self.next_age += 1
        return self.next_age if self.order == BY_BLOCK else self.next_age << ADDRESS_BITS

    def part_age(self, whole: MemoryBlock) -> int:
        """Return the age of a block that is cut out of another: the same, except where blocks have ages."""
        return self.new_age() if self.order == BY_BLOCK else whole.age

    def count_reserved(self, pool: Pool, change: int) -> None:
        """Count bytes that were reserved, or given back."""
        self.reserved += change
        pool.reserved += change
        if self.reserved > self.reserved_peak:
            self.reserved_peak = self.reserved
        if pool.reserved > pool.reserved_peak:
            pool.reserved_peak = pool.reserved
