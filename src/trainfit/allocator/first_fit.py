"""The plainest heap: every request gets the lowest addresses that are free. One segment, which only grows.

Stands in where no caching allocator is simulated (a CPU, or `--allocator none`), so that blocks have places.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from trainfit.allocator.placed_blocks import PlacedBlock, PlacedSegment

ALIGNMENT = 64
"""What torch aligns memory of a CPU to."""
_FIRST_ADDRESS = 1 << 40


class FirstFit:
    """Addresses for what is alive."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._gaps: list[tuple[int, int]] = []
        """Free stretches below the end, by address: begin and end; two never touch."""
        self._end = _FIRST_ADDRESS
        self._alive: dict[int, tuple[int, int]] = {}
        """Address and bytes asked for, by number."""

    @property
    def reserved(self) -> int:
        """How much memory was ever in use."""
        return self._end - _FIRST_ADDRESS

    def allocate(self, number: int, size: int, stream: int) -> int:
        """Return the lowest address with room, whatever the stream."""
        needed = _aligned(size)
        at = next((at for at, (begin, end) in enumerate(self._gaps) if end - begin >= needed), None)
        if at is None:
            address, self._end = self._end, self._end + needed
        else:
            address, end = self._gaps[at]
            self._gaps[at : at + 1] = [(address + needed, end)] if end - address > needed else []
        self._alive[number] = (address, size)
        return address

    def free(self, number: int, also_used_on: Sequence[int]) -> tuple[int, int]:
        """Return the address and, negative, the bytes that were asked for."""
        address, size = self._alive.pop(number)
        begin, end = address, address + _aligned(size)
        at = bisect_left(self._gaps, (begin, end))
        first, last = at, at
        if at < len(self._gaps) and self._gaps[at][0] == end:
            end, last = self._gaps[at][1], at + 1
        if at > 0 and self._gaps[at - 1][1] == begin:
            begin, first = self._gaps[at - 1][0], at - 1
        self._gaps[first:last] = [(begin, end)]
        return address, -size

    def segments(self, owner: dict[int, int]) -> tuple[PlacedSegment, ...]:
        """Return the one segment, or none if nothing was ever asked for."""
        blocks = [
            PlacedBlock(address, _aligned(size), size, owner[number])
            for number, (address, size) in self._alive.items()
        ]
        blocks += [PlacedBlock(begin, end - begin, 0, None) for begin, end in self._gaps]
        blocks.sort(key=lambda block: block.address)
        if not blocks:
            return ()
        return (PlacedSegment(_FIRST_ADDRESS, self.reserved, False, True, tuple(blocks)),)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
