"""Improve an order without ever making it worse: releases as early as possible, growth as late as possible.

A node that can run, does not add memory and fits under the peak may run at once. Nothing that follows needs
more for it: the more has run, the more a node releases, so that wherever it stood before, memory from here to
there is the same or less with it than without. The same holds from the other end for nodes that add memory.
Both passes take O(n log n), and memory at every step stays the same or falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from trainfit.ordering.ordering_problem import OrderingProblem, peak_of

_DONE = -1


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
    growth = list(problem.alloc)
    for block, members in enumerate(problem.members):
        if len(members) == 1:
            growth[members[0]] -= problem.freed[block]
    missing = [len(members) for members in problem.members]
    waiting = [len(before) for before in problem.predecessors]
    rise, freed, blocks, members_of = problem.rise, problem.freed, problem.blocks, problem.members
    at_once = [(rise[node], node) for node, count in enumerate(waiting) if not count and growth[node] <= 0]
    heapify(at_once)
    memory = problem.initial_bytes
    found: list[int] = []
    upcoming = iter(order)
    while len(found) < problem.count:
        if at_once and memory + at_once[0][0] <= limit:
            node = heappop(at_once)[1]
        else:
            node = next(upcoming)
        if waiting[node] == _DONE:
            continue
        found.append(node)
        waiting[node] = _DONE
        memory += growth[node]
        for block in blocks[node]:
            missing[block] -= 1
            if missing[block] == 1:
                last = next(member for member in members_of[block] if waiting[member] != _DONE)
                growth[last] -= freed[block]
                if waiting[last] == 0 and growth[last] <= 0:
                    heappush(at_once, (rise[last], last))
        for after in problem.successors[node]:
            waiting[after] -= 1
            if waiting[after] == 0 and growth[after] <= 0:
                heappush(at_once, (rise[after], after))
    return found


def grow_late(problem: OrderingProblem, order: Sequence[int], limit: int) -> list[int]:
    """Run everything that adds memory and fits under `limit` as late as it can run."""
    rise, freed, blocks, members_of = problem.rise, problem.freed, problem.blocks, problem.members
    # By how much memory before the node is above memory after it, if it were the last of those that remain.
    before_bytes = [
        sum([freed[block] for block in blocks[node]]) - problem.alloc[node] for node in range(problem.count)
    ]
    untouched = [True] * len(members_of)
    waiting = [len(after) for after in problem.successors]
    at_once: list[tuple[int, int]] = []

    def offer(node: int) -> None:
        if before_bytes[node] <= 0:
            heappush(at_once, (before_bytes[node] + rise[node], node))

    for node, count in enumerate(waiting):
        if count == 0:
            offer(node)
    memory = problem.final_bytes
    found: list[int] = []
    upcoming = reversed(order)
    while len(found) < problem.count:
        if at_once and memory + at_once[0][0] <= limit:
            node = heappop(at_once)[1]
        else:
            node = next(upcoming)
        if waiting[node] == _DONE:
            continue
        found.append(node)
        waiting[node] = _DONE
        memory += before_bytes[node]
        for block in blocks[node]:
            if untouched[block]:
                untouched[block] = False
                for member in members_of[block]:
                    before_bytes[member] -= freed[block]
                    if waiting[member] == 0:
                        offer(member)
        for before in problem.predecessors[node]:
            waiting[before] -= 1
            if waiting[before] == 0:
                offer(before)
    return found[::-1]
