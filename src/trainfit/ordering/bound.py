"""What no order can be below: memory at the beginning and at the end, and minimum cuts at any node."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainfit.ordering.cuts import least_memory_before
from trainfit.ordering.problem import Problem


@dataclass
class CutBounds:
    """Minimum cuts at chosen nodes, each made once, within a limit of work."""

    problem: Problem
    work_left: int
    bound: int = 0
    known: set[int] = field(default_factory=set)
    known_twins: set[tuple[int, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Begin with what is alive before and after everything."""
        self.bound = max(self.problem.initial_bytes, self.problem.final_bytes)

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
        """Raise the bound by all nodes like this one: some one of them runs first, and some one last.

        The first finds none of the others done, the last all of them; whichever it is, the least of their
        figures is a bound. Branches that are alike are bounded so, of which each could wait for the others.
        """
        twins = self._twins(node)
        if len(twins) < 2 or tuple(twins) in self.known_twins:
            return
        self.known_twins.add(tuple(twins))
        for first in (True, False):
            self.bound = max(self.bound, self._least_of(twins, first=first))

    def _least_of(self, twins: list[int], *, first: bool) -> int:
        """Return the least that any of the twins needs when it runs before, or after, all the others."""
        found: int | None = None
        for node in twins:
            if self.work_left <= 0:
                return 0
            others = [other for other in twins if other != node]
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

    def _twins(self, node: int) -> list[int]:
        """Return the nodes that add and need as much as this one, and have as many neighbours."""
        problem = self.problem

        def likeness(node: int) -> tuple[int, ...]:
            sizes = (problem.rise[node], problem.alloc[node])
            return (*sizes, len(problem.predecessors[node]), len(problem.blocks[node]))

        wanted = likeness(node)
        return [other for other in range(problem.count) if likeness(other) == wanted]
