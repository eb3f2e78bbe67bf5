"""The nodes that can run next, grouped by what they need while they run; the best one in O(log n)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from heapq import heappop, heappush

_NOTHING = float("inf")


class ReadyNodes:
    """Ready nodes in one heap per distinct rise, under a tree of minima over the rises in order.

    A key is `growth * count + node`: it orders by growth, then by node, and is one number.
    """

    def __init__(self, rise: Sequence[int], count: int) -> None:
        """Start with nothing ready."""
        self._sizes = sorted(set(rise))
        position = {size: number for number, size in enumerate(self._sizes)}
        self._group = [position[size] for size in rise]
        self._heaps: list[list[int]] = [[] for _ in self._sizes]
        self._key: list[int | None] = [None] * count
        self._count = count
        self._width = 1
        while self._width < len(self._sizes):
            self._width *= 2
        self._least: list[float] = [_NOTHING] * (2 * self._width)

    def add(self, node: int, growth: int) -> None:
        """Make a node ready, or change the growth of one that is."""
        key = growth * self._count + node
        self._key[node] = key
        heappush(self._heaps[self._group[node]], key)
        self._refresh(self._group[node])

    def pop_best(self, room: int) -> int:
        """Take out the node of least growth among those that rise by at most `room`.

        If there is none, the one of the smallest rise, and among those of the least growth.
        """
        fitting = bisect_right(self._sizes, room)
        key = self._least_below(fitting)
        if key == _NOTHING:
            key = self._least[self._width + self._first_group()]
        node = int(key) % self._count
        self._key[node] = None
        self._refresh(self._group[node])
        return node

    def _refresh(self, group: int) -> None:
        heap, count, current = self._heaps[group], self._count, self._key
        while heap and current[heap[0] % count] != heap[0]:
            heappop(heap)
        least, place = self._least, self._width + group
        value: float = heap[0] if heap else _NOTHING
        if least[place] == value:
            return
        least[place] = value
        while place > 1:
            value = min(least[place], least[place ^ 1])
            place //= 2
            if least[place] == value:
                return
            least[place] = value

    def _least_below(self, end: int) -> float:
        if end >= len(self._sizes):
            return self._least[1]
        least, found = self._least, _NOTHING
        low, high = self._width, self._width + end
        while low < high:
            if low & 1:
                found = min(found, least[low])
                low += 1
            if high & 1:
                high -= 1
                found = min(found, least[high])
            low //= 2
            high //= 2
        return found

    def _first_group(self) -> int:
        place = 1
        while place < self._width:
            place *= 2
            if self._least[place] == _NOTHING:
                place += 1
        return place - self._width
