"""What no order can be below: memory at the beginning and at the end, and a minimum cut at any node."""

from __future__ import annotations

from collections.abc import Iterable
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

    def __post_init__(self) -> None:
        """Begin with what is alive before and after everything."""
        self.bound = max(self.problem.initial_bytes, self.problem.final_bytes)

    def at(self, nodes: Iterable[int]) -> int:
        """Return the best bound so far, after looking at some more nodes."""
        for node in nodes:
            if node not in self.known and self.work_left > 0:
                least = least_memory_before(self.problem, node, self.work_left)
                self.known.add(node)
                self.work_left -= least.work if least is not None else self.work_left
                if least is not None:
                    self.bound = max(self.bound, least.bytes + self.problem.rise[node])
        return self.bound
