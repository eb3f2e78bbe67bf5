"""What no order can be below: memory at the beginning and at the end, and minimum cuts at any node."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainfit.ordering.least_memory import least_memory_before
from trainfit.ordering.ordering_problem import OrderingProblem


@dataclass
class CutBounds:
    """Minimum cuts at chosen nodes, each made once, within a limit of work."""

    problem: OrderingProblem
    work_left: int
    bound: int = 0
    known: set[int] = field(default_factory=set)
    known_sets: set[tuple[int, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Begin with what is alive before and after everything."""
        self.bound = max(self.problem.initial_bytes, self.problem.final_bytes)
        if self.problem.count + len(self.problem.members) > self.work_left:
            self.work_left = 0  # not even one cut could be made

    def at(self, node: int) -> None:
        """Raise the bound by a cut at one node."""
        if node in self.known or self.work_left <= 0:
            return
        self.known.add(node)
        least = least_memory_before(self.problem, node, self.work_left)
        assert least is not None, "a node can always run after its ancestors"
        self.work_left -= least.work
        self.bound = max(self.bound, least.bytes + self.problem.rise[node])

    def at_twins_of(self, node: int) -> None:
        """Raise the bound by all nodes that add and need as much as this one and have as many neighbours.

        This bounds branches that are alike, where each one could wait for the others.
        """
        wanted = self._likeness(node)
        self._at_set([other for other in range(self.problem.count) if self._likeness(other) == wanted])

    def at_largest(self) -> None:
        """Raise the bound by sets of the nodes that need most: the largest two, three, four and so on."""
        largest = sorted(range(self.problem.count), key=lambda node: (-self.problem.rise[node], node))
        for count in _SET_SIZES:
            self._at_set(sorted(largest[:count]))

    def _at_set(self, nodes: list[int]) -> None:
        """Raise the bound by a set of nodes: one of them runs first, and one of them last.

        The first runs before all the others, the last after all of them. Which one it is depends on the
        order, so that the least of their figures is a bound.
        """
        if not 2 <= len(nodes) <= _LARGEST_SET or tuple(nodes) in self.known_sets:
            return
        self.known_sets.add(tuple(nodes))
        for first in (True, False):
            self.bound = max(self.bound, self._least_of(nodes, first=first))

    def _least_of(self, nodes: list[int], *, first: bool) -> int:
        """Return the least that any of some nodes needs when it runs before, or after, all the others."""
        found: int | None = None
        for node in nodes:
            if self.work_left <= 0:
                return 0
            others = [other for other in nodes if other != node]
            least = least_memory_before(
                self.problem,
                node,
                self.work_left,
                already_run=() if first else others,
                not_yet_run=others if first else (),
            )
            if least is None:
                continue  # it cannot be the first, or the last
            self.work_left -= least.work
            needed = least.bytes + self.problem.rise[node]
            found = needed if found is None else min(found, needed)
            if found <= self.bound:
                return 0
        return found or 0

    def _likeness(self, node: int) -> tuple[int, ...]:
        problem = self.problem
        sizes = (problem.rise[node], problem.alloc[node])
        return (*sizes, len(problem.predecessors[node]), len(problem.blocks[node]))


_SET_SIZES = (2, 3, 4, 6, 8, 12, 16)
_LARGEST_SET = 24
"""A set takes two cuts for each of its nodes, and the least of many figures is a weak bound."""
