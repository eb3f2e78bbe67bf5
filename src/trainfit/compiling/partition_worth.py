"""Of a partition, which values are worth most: seconds of computing again for each byte that is kept."""

from __future__ import annotations

import math

from trainfit.compiling.recompute_problem import Partition, RecomputeProblem, Role


def by_worth(problem: RecomputeProblem, partition: Partition, *, repeated: bool) -> list[int]:
    """Return what could be kept as well, most seconds per byte first; or what is kept, fewest first."""
    nodes, sizes = problem.nodes, problem.own_bytes
    if not repeated:
        lost = {n: _seconds_without(problem, partition, n) for n in partition.kept}
        return sorted(partition.kept, key=lambda n: lost[n] / max(sizes[n], 1))
    again = set(partition.repeated)
    seconds: dict[int, float] = {}
    for number in partition.repeated:
        # What only this node needs would not run either.
        total = nodes[number].seconds
        for read in nodes[number].reads:
            if read in again and all(u == number for u in problem.users[read] if u in again):
                total += seconds.get(read, 0.0)
        seconds[number] = total
    able = [n for n in partition.repeated if nodes[n].keepable and nodes[n].role is Role.FORWARD]
    return sorted(able, key=lambda n: (-seconds[n] / max(sizes[n], 1), n))


def _seconds_without(problem: RecomputeProblem, partition: Partition, number: int) -> float:
    """Return what would run again as well if a value were not kept; without end if that cannot be."""
    nodes = problem.nodes
    there = {*partition.kept, *partition.repeated} - {number}
    total = 0.0
    pending = [number]
    while pending:
        here = pending.pop()
        if here in there or nodes[here].role is not Role.FORWARD:
            continue
        if not nodes[here].repeatable:
            return math.inf
        there.add(here)
        total += nodes[here].seconds
        pending += nodes[here].reads
    return total
