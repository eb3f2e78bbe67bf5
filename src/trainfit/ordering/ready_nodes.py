"""An order that grows from one of its ends: the nodes that can come next, and the best one in O(log n)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from trainfit.ordering.ordering_problem import OrderingProblem

_NOTHING = float("inf")
_DONE = -1


class GrowingOrder:
    """What has been taken from one end, memory there, and what each other node would add."""

    def __init__(self, problem: OrderingProblem, *, backwards: bool) -> None:
        """Start with nothing taken."""
        self.rise, self.backwards = problem.rise, backwards
        self._problem = problem
        self._followers = problem.predecessors if backwards else problem.successors
        self._waiting = [len(n) for n in (problem.successors if backwards else problem.predecessors)]
        sizes = [len(members) for members in problem.members]
        self._until_change = [1] * len(sizes) if backwards else [size - 1 for size in sizes]
        """How many of a block's members are taken until it changes what the others add."""
        freed = [sum([problem.freed[b] for b in own if backwards or sizes[b] == 1]) for own in problem.blocks]
        self.memory = problem.final_bytes if backwards else problem.initial_bytes
        sign = -1 if backwards else 1
        self.growth = [sign * (alloc - free) for alloc, free in zip(problem.alloc, freed)]
        """By how much memory at the border rises if the node is taken next."""

    def ready(self) -> list[int]:
        """Return the nodes that can be taken now."""
        return [node for node, count in enumerate(self._waiting) if count == 0]

    def is_taken(self, node: int) -> bool:
        """Whether a node has been taken."""
        return self._waiting[node] == _DONE

    def needed(self, node: int) -> int:
        """Return memory while the node runs, above memory at the border before it is taken."""
        return self.rise[node] + (self.growth[node] if self.backwards else 0)

    def take(self, node: int) -> Iterator[int]:
        """Take a node; yield the nodes that can be taken then and could not before, or add less now."""
        problem, waiting, until_change = self._problem, self._waiting, self._until_change
        waiting[node] = _DONE
        self.memory += self.growth[node]
        for block in problem.blocks[node]:
            until_change[block] -= 1
            if until_change[block] == 0:
                for member in problem.members[block]:
                    if waiting[member] != _DONE:
                        self.growth[member] -= problem.freed[block]
                        if waiting[member] == 0:
                            yield member
        for other in self._followers[node]:
            waiting[other] -= 1
            if waiting[other] == 0:
                yield other


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
