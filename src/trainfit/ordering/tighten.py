"""Improve an order without ever making it worse: releases as early as possible, growth as late as possible.

A node that can run, does not add memory and fits under the peak may run at once. Nothing that follows needs
more for it: the more has run, the more a node releases, so that wherever it stood before, memory from here to
there is the same or less with it than without. The same holds from the other end for nodes that add memory.
Both passes take O(n log n), and memory at every step stays the same or falls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from trainfit.ordering.ordering_problem import OrderingProblem, peak_of
from trainfit.ordering.ready_nodes import GrowingOrder


def tighten(problem: OrderingProblem, order: Sequence[int], rounds: int = 6) -> tuple[list[int], int]:
    """Return the improved order and its peak, after as many rounds of both passes as lower the peak."""
    best, peak = list(order), peak_of(problem, order)
    for _ in range(rounds):
        current = grow_late(problem, release_early(problem, best, peak), peak)
        lowered = peak_of(problem, current)
        assert lowered <= peak, "tightening made an order worse"
        best = current
        if lowered == peak:
            break
        peak = lowered
    return best, peak


def release_early(problem: OrderingProblem, order: Sequence[int], limit: int) -> list[int]:
    """Run everything that adds nothing and fits under `limit` as soon as it can run."""
    return _at_once(GrowingOrder(problem, backwards=False), order, limit)


def grow_late(problem: OrderingProblem, order: Sequence[int], limit: int) -> list[int]:
    """Run everything that adds memory and fits under `limit` as late as it can run."""
    return _at_once(GrowingOrder(problem, backwards=True), order[::-1], limit)[::-1]


def _at_once(growing: GrowingOrder, order: Sequence[int], limit: int) -> list[int]:
    """Follow an order from one end, but take what adds nothing and fits under `limit` as soon as possible."""
    at_once: list[tuple[int, int]] = []

    def offer(nodes: Iterable[int]) -> None:
        for node in nodes:
            if growing.growth[node] <= 0:
                heappush(at_once, (growing.needed(node), node))

    offer(growing.ready())
    found: list[int] = []
    upcoming = iter(order)
    while len(found) < len(order):
        if at_once and growing.memory + at_once[0][0] <= limit:
            node = heappop(at_once)[1]
        else:
            node = next(upcoming)
        if not growing.is_taken(node):
            found.append(node)
            offer(growing.take(node))
    return found
