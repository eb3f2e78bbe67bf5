"""How far another order of backward lowers its peak, and worked out without dividing the graph.

The order that a divided graph gets is found on it (`split_graphs.py`), with more effort: what is worked out
here says which partitions are worth dividing.
"""

from __future__ import annotations

from trainfit.compiling.fast_partitions import GraphRows, Judgement
from trainfit.compiling.partition_memory import PartitionMemory
from trainfit.compiling.recompute_problem import Partition
from trainfit.ordering.bound import CutBounds
from trainfit.ordering.heuristics import deepest_need_first, least_peak_first, least_peak_last
from trainfit.ordering.ordering_problem import OrderingProblem, make_problem, step_bytes
from trainfit.ordering.tighten import tighten

_CUT_WORK = 100_000
"""Edges that are looked at for a bound."""


class BackwardOrders:
    """Answers for the partitions of one problem that nothing fuses."""

    def __init__(self, memory: PartitionMemory) -> None:
        """Begin with none."""
        self._memory = memory
        self._known: dict[tuple[int, ...], int] = {}

    def backward_peak(self, partition: Partition) -> int:
        """Return the peak of backward in the best order that few tries find; the same whoever asks."""
        if partition.kept not in self._known:
            judged = self._memory.judged(partition)
            found = quick_order(ordering_problem(self._memory.judge.rows, judged))[1]
            self._known[partition.kept] = min(partition.backward_peak_bytes, found)
        return self._known[partition.kept]


def quick_order(problem: OrderingProblem) -> tuple[list[int], int, int]:
    """Return the best order that few tries find, its peak, and what no order is below."""
    order = list(range(problem.count))
    alive = step_bytes(problem, order)
    peak = max([problem.initial_bytes, *alive])
    bounds = CutBounds(problem, _CUT_WORK)
    if alive:
        bounds.at(max(order, key=alive.__getitem__))
    found = order, peak
    tries = (lambda _: order, least_peak_first, least_peak_last, deepest_need_first)
    for make in tries:
        if found[1] > bounds.bound:
            found = min(found, tighten(problem, make(problem)), key=lambda tried: tried[1])
    return *found, bounds.bound


def ordering_problem(rows: GraphRows, judged: Judgement) -> OrderingProblem:
    """Return what can be ordered in backward: a node is its place in the order that was judged."""
    place = {number: at for at, number in enumerate(judged.order)}
    kept = {s for number in judged.kept for s in rows.storages[number] if not rows.callers[s]}
    there = kept | {s for s, given in enumerate(rows.given) if given}
    sizes = rows.sizes
    alloc: list[int] = []
    rise: list[int] = []
    before: list[list[int]] = []
    members: dict[int, list[int]] = {}
    made: set[int] = set()
    last = -1
    for at, number in enumerate(judged.order):
        own = [s for s in rows.makes[number] if s not in there]
        made.update(own)
        alloc.append(sum(sizes[s] for s in own))
        inside = sum(sizes[s] for s in rows.makes[number]) - alloc[-1]
        rise.append(alloc[-1] + inside + rows.workspaces[number])
        for storage in rows.touches[number]:
            members.setdefault(storage, []).append(at)
        before.append([place[read] for read in rows.reads[number] if read in place])
        if not rows.repeatable[number]:
            # What draws, writes or has effects keeps its turn.
            before[-1] += [last] if last >= 0 else []
            last = at
    return make_problem(
        rise=rise,
        alloc=alloc,
        predecessors=before,
        blocks=[
            (tuple(nodes), sizes[storage])
            for storage, nodes in members.items()
            if (storage in there or storage in made)
            and not rows.staying[storage]
            and not rows.callers[storage]
        ],
        initial_bytes=sum(sizes[storage] for storage in there),
    )
