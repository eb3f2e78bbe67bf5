"""A device as the allocator sees it: so many bytes, and addresses for them.

Memory is taken in pages of 2 MiB, as on a GPU, where pages are mapped one by one: there is no physical
fragmentation. Addresses of segments are the lowest that are free; those of expandable segments are never used
again. Nothing but the order of addresses matters to the allocator.
"""

from __future__ import annotations

from bisect import bisect_left

PAGE = 2 << 20
FIRST_ADDRESS = 16 << 40
FIRST_RESERVED_ADDRESS = 96 << 40
GAP = 1 << 30
"""Between two reservations."""


class StandInDevice:
    """Bytes that can be had, and counters of the calls that ask for them."""

    def __init__(self, capacity: int, total: int) -> None:
        """Give out at most `capacity` bytes, and say that there are `total`."""
        self.capacity = capacity
        self.total = total
        self.used = 0
        self.used_peak = 0
        self.malloc_calls = 0
        self.malloc_failures = 0
        self.free_calls = 0
        self.create_calls = 0
        self.create_failures = 0
        self.releases = 0
        self.reservations = 0
        self.held_peak = 0  # as `used_peak`, but without pages that were given back at once
        self.smallest_refusal = -1  # the smallest number of bytes that was too much; -1: none
        self._gap_begins = [FIRST_ADDRESS]
        self._gap_ends = [FIRST_RESERVED_ADDRESS]
        self._next_reservation = FIRST_RESERVED_ADDRESS

    def malloc(self, size: int) -> int:
        """Return the address of that many bytes, or -1 if there are not that many."""
        self.malloc_calls += 1
        size = (size + PAGE - 1) // PAGE * PAGE
        if not self._take(size):
            self.malloc_failures += 1
            return -1
        at = 0
        while self._gap_ends[at] - self._gap_begins[at] < size:
            at += 1
        address = self._gap_begins[at]
        self._gap_begins[at] = address + size
        if self._gap_begins[at] == self._gap_ends[at]:
            del self._gap_begins[at], self._gap_ends[at]
        return address

    def free(self, address: int, size: int) -> None:
        """Take back what `malloc` gave."""
        self.free_calls += 1
        size = (size + PAGE - 1) // PAGE * PAGE
        self.used -= size
        end = address + size
        at = bisect_left(self._gap_begins, address)
        joins_before = at > 0 and self._gap_ends[at - 1] == address
        joins_after = at < len(self._gap_begins) and self._gap_begins[at] == end
        if joins_before and joins_after:
            self._gap_ends[at - 1] = self._gap_ends[at]
            del self._gap_begins[at], self._gap_ends[at]
        elif joins_before:
            self._gap_ends[at - 1] = end
        elif joins_after:
            self._gap_begins[at] = address
        else:
            self._gap_begins.insert(at, address)
            self._gap_ends.insert(at, end)

    def reserve(self, size: int) -> int:
        """Return the address of so much address space."""
        self.reservations += 1
        address = self._next_reservation
        self._next_reservation += (size + GAP) // PAGE * PAGE
        return address

    def create(self, pages: int, page: int) -> bool:
        """Take so many pages one by one; all are given back if one of them cannot be had."""
        fitting = (self.capacity - self.used) // page
        if fitting >= pages:
            self.create_calls += pages
            return self._take(pages * page)
        self._note_refusal(self.used + pages * page)
        self.create_calls += fitting + 1
        self.create_failures += 1
        self.releases += fitting
        self.used_peak = max(self.used_peak, self.used + fitting * page)
        return False

    def release(self, pages: int, page: int) -> None:
        """Take pages back."""
        self.releases += pages
        self.used -= pages * page

    def _take(self, size: int) -> bool:
        used = self.used + size
        if used > self.capacity:
            self._note_refusal(used)
            return False
        self.used = used
        if used > self.held_peak:
            self.held_peak = used
            self.used_peak = max(self.used_peak, used)
        return True

    def _note_refusal(self, needed: int) -> None:
        if self.smallest_refusal < 0 or needed < self.smallest_refusal:
            self.smallest_refusal = needed
