"""The smallest possible peak by searching sets of nodes, and a bound where that takes too many of them.

Memory depends on which nodes have run, not on their order, so that the search goes over sets: always from the
set that is reached with the smallest peak so far (Dijkstra's algorithm with the maximum in place of the sum).
From each set everything runs at once that adds no memory and fits under the peak so far; see `tighten.py` for
why nothing is lost. When a set is taken up, no order has a smaller peak than that of its way: if the search
is cut off, that is the bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from trainfit.ordering.problem import Problem


@dataclass(frozen=True)
class Searched:
    """What a search found: an order with a peak below the limit, if any, and what no order can be below."""

    order: list[int] | None
    bound: int
    states: int


def search(problem: Problem, *, below: int, at_least: int, states: int) -> Searched:
    """Look for the order with the smallest peak below `below`, looking at about that many sets of nodes.

    `at_least` is a bound that is known already. If the search ends without an order, `below` is the bound:
    no order has a smaller peak.
    """
    return _Search(problem, below, at_least).run(states)


class _Search:
    """Sets of nodes are bits of an integer."""

    def __init__(self, problem: Problem, below: int, at_least: int) -> None:
        self.problem = problem
        self.below = below
        self.at_least = max(at_least, problem.initial_bytes, problem.final_bytes)
        self.before = [_bits(nodes) for nodes in problem.predecessors]
        self.members = [_bits(nodes) for nodes in problem.members]
        self.everything = (1 << problem.count) - 1
        self.best_peak: dict[int, int] = {}
        self.reached: dict[int, tuple[int, tuple[int, ...]]] = {}
        """Each set with the set it was reached from and the nodes that ran between them."""
        self.heap: list[tuple[int, int, int, int, int]] = []
        self.looked_at = 0

    def run(self, states: int) -> Searched:
        if self.at_least >= self.below:
            return Searched(None, self.below, 0)
        start = _bits(node for node, before in enumerate(self.before) if not before)
        self._reach(-1, (), 0, self.problem.initial_bytes, self.at_least, start)
        while self.heap:
            peak, _, done, memory, ready = heappop(self.heap)
            if peak > self.best_peak[done]:
                continue
            if done == self.everything:
                return Searched(self._order(done), peak, self.looked_at)
            if self.looked_at >= states:
                return Searched(None, peak, self.looked_at)
            self._expand(done, memory, peak, ready)
        return Searched(None, self.below, self.looked_at)

    def _expand(self, done: int, memory: int, peak: int, ready: int) -> None:
        rise = self.problem.rise
        remaining = ready
        while remaining:
            bit = remaining & -remaining
            remaining ^= bit
            node = bit.bit_length() - 1
            needed = max(peak, memory + rise[node])
            if needed < self.below:
                self.looked_at += 1
                after, ready_after = self._run_node(node, done, ready)
                grown = memory + self._growth(node, done)
                self._reach(done, (node,), after, grown, needed, ready_after)

    def _reach(
        self, origin: int, ran: tuple[int, ...], done: int, memory: int, peak: int, ready: int
    ) -> None:
        """Run what costs nothing, and note the set if this is the best way to it so far."""
        rise = self.problem.rise
        nodes = list(ran)
        candidates = ready
        while candidates:
            bit = candidates & -candidates
            candidates ^= bit
            node = bit.bit_length() - 1
            if memory + rise[node] <= peak and (growth := self._growth(node, done)) <= 0:
                nodes.append(node)
                memory += growth
                done, ready = self._run_node(node, done, ready)
                candidates = ready
        known = self.best_peak.get(done)
        if known is None or peak < known:
            self.best_peak[done] = peak
            self.reached[done] = (origin, tuple(nodes))
            # Ties go to the set with more nodes in it: the end is near.
            heappush(self.heap, (peak, -done.bit_count(), done, memory, ready))

    def _growth(self, node: int, done: int) -> int:
        growth = self.problem.alloc[node]
        open_nodes = ~(done | 1 << node)
        for block in self.problem.blocks[node]:
            if not self.members[block] & open_nodes:
                growth -= self.problem.freed[block]
        return growth

    def _run_node(self, node: int, done: int, ready: int) -> tuple[int, int]:
        done |= 1 << node
        ready &= ~(1 << node)
        for after in self.problem.successors[node]:
            if not self.before[after] & ~done:
                ready |= 1 << after
        return done, ready

    def _order(self, done: int) -> list[int]:
        parts: list[tuple[int, ...]] = []
        while done >= 0:
            done, nodes = self.reached[done]
            parts.append(nodes)
        return [node for nodes in reversed(parts) for node in nodes]


def _bits(nodes: Iterable[int]) -> int:
    found = 0
    for node in nodes:
        found |= 1 << node
    return found
