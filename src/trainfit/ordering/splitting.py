"""Split a problem where every order has to pass: each part can then be ordered by itself.

A node that every other node must precede or follow divides the others once and for all. The peak of the whole
is the largest of the parts' peaks, and so is the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainfit.ordering.ordering_problem import OrderingProblem, make_problem


@dataclass(frozen=True)
class Part:
    """A stretch of the order: its nodes in the whole problem, and the problem of ordering them.

    Node i of `problem` is `nodes[i]` of the whole; they are in the order that the whole was given in.
    """

    nodes: list[int]
    problem: OrderingProblem


class Splitter:
    """Cuts ranges out of an order, each as a problem of its own while the rest stays as it is."""

    def __init__(self, problem: OrderingProblem, order: Sequence[int]) -> None:
        """Note where everything is in the order, and how much memory there is before each step."""
        self._problem = problem
        self._order = order
        position = [0] * problem.count
        for step, node in enumerate(order):
            position[node] = step
        self._position = position
        self._released = [max([position[node] for node in members]) for members in problem.members]
        self._before = [problem.initial_bytes]
        freed = [0] * problem.count
        for block, step in enumerate(self._released):
            freed[step] += problem.freed[block]
        for step, node in enumerate(order):
            self._before.append(self._before[-1] + problem.alloc[node] - freed[step])

    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges that can be ordered one by one: between them every order has to pass."""
        ends = _borders(self._problem, self._order)
        return list(zip([0, *ends], ends))

    def peak(self, start: int, end: int) -> int:
        """Return the peak within a range, what is alive before it included."""
        rise = self._problem.rise
        steps = [self._before[step] + rise[self._order[step]] for step in range(start, end)]
        return max([self._before[start], *steps])

    def part(self, start: int, end: int) -> Part:
        """Return a range as a part, in time that depends on the range alone."""
        problem = self._problem
        nodes = list(self._order[start:end])
        # A block is released where the last of its members is.
        blocks = [
            block
            for block in dict.fromkeys(block for node in nodes for block in problem.blocks[node])
            if self._released[block] < end
        ]
        inner = make_problem(
            rise=[problem.rise[node] for node in nodes],
            alloc=[problem.alloc[node] for node in nodes],
            predecessors=[self._from(problem.predecessors[node], start) for node in nodes],
            blocks=[(self._from(problem.members[block], start), problem.freed[block]) for block in blocks],
            initial_bytes=self._before[start],
        )
        return Part(nodes, inner)

    def _from(self, nodes: tuple[int, ...], start: int) -> tuple[int, ...]:
        """Return the places in the range of those nodes that are not before it."""
        positions = [self._position[node] - start for node in nodes]
        return tuple(sorted([position for position in positions if position >= 0]))


def _borders(problem: OrderingProblem, order: Sequence[int]) -> list[int]:
    """Return the positions before which a part ends, the last one being the length of the order."""
    after_all_before = _only_end(order, problem.predecessors)
    before_all_after = _only_end(order[::-1], problem.successors)[::-1]
    borders: set[int] = {len(order)}
    for position, (last, first) in enumerate(zip(after_all_before, before_all_after)):
        if last and first:
            borders |= {position, position + 1}
    return sorted(borders - {0}) or [0]


def _only_end(order: Sequence[int], neighbours: Sequence[tuple[int, ...]]) -> list[bool]:
    """Return for each node of a sequence whether all before it lead to it."""
    continued = [False] * len(neighbours)
    ends = 0
    found = []
    for node in order:
        ends += 1
        for other in neighbours[node]:
            if not continued[other]:
                continued[other] = True
                ends -= 1
        found.append(ends == 1)
    return found
