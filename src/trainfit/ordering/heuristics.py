"""Orders that are found in one pass: torch's three, least peak last, and deepest need first.

`least_peak_first`, `breadth_first` and `depth_first` give the orders that torch's scheduler chooses among, so
that results can be compared; least peak first takes O(n log n) here. `least_peak_last` is the same greed from
the end of the order, and `deepest_need_first` visits what needs most memory first, as compilers do for
registers (Sethi and Ullman, 1970): optimal on trees whose nodes are of equal size, a good start elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from trainfit.ordering.graph import BufferGraph
from trainfit.ordering.ordering_problem import OrderingProblem
from trainfit.ordering.ready_nodes import GrowingOrder, ReadyNodes


@dataclass(frozen=True)
class VisitOrder:
    """What depth first needs besides the problem: what each node reads by name, and how much that is."""

    named_predecessors: list[tuple[int, ...]]
    touched_bytes: list[int]


def visit_order_of(graph: BufferGraph, problem: OrderingProblem) -> VisitOrder:
    """Return, for each node, the nodes that it names and the bytes that it allocates and reads."""
    number, producer = graph.buffer_number, graph.producer
    named = []
    touched = []
    for node, entry in enumerate(graph.nodes):
        changed = [graph.buffers[number[name]].alias_of for name in entry.buffers]
        names = [*entry.reads, *(name for name in changed if name is not None)]
        before = [producer[number[name]] for name in names]
        before += [graph.node_number[name] for name in entry.after]
        named.append(tuple(sorted({other for other in before if other >= 0 and other != node})))
        read = sum(graph.buffers[buffer].size_free for buffer in graph.reads[node])
        touched.append(problem.alloc[node] + read)
    return VisitOrder(named, touched)


def least_peak_first(problem: OrderingProblem, output_bytes: int = 0) -> list[int]:
    """Run what does not raise the peak, least growth first; if nothing is like that, the smallest rise.

    `output_bytes` will be alive in the end whatever the order, so that a peak of that much is free.
    """
    growing = GrowingOrder(problem, backwards=False)
    peak = max(problem.initial_bytes, output_bytes)
    return _greedy(growing, ReadyNodes(problem.rise, problem.count), peak)


def breadth_first(problem: OrderingProblem) -> list[int]:
    """Run the node whose predecessors ran earliest: first come, first served."""
    waiting = [len(before) for before in problem.predecessors]
    step = [-1] * problem.count
    ready: list[tuple[list[int], int]] = []
    for node, count in enumerate(waiting):
        if count == 0:
            heappush(ready, ([], node))
    order: list[int] = []
    while ready:
        node = heappop(ready)[1]
        step[node] = len(order)
        order.append(node)
        for after in problem.successors[node]:
            waiting[after] -= 1
            if waiting[after] == 0:
                heappush(ready, (sorted(step[before] for before in problem.predecessors[after]), after))
    return order


def depth_first(problem: OrderingProblem, visits: VisitOrder) -> list[int]:
    """Run each node right after what it needs; nodes that touch fewer bytes are visited first."""

    def rank(node: int) -> tuple[int, int]:
        return visits.touched_bytes[node], node

    starts = sorted(range(problem.count), key=rank)
    return _visit(starts, [tuple(sorted(before, key=rank)) for before in visits.named_predecessors])


def deepest_need_first(problem: OrderingProblem) -> list[int]:
    """Run each node right after what it needs; of that, what needs more memory than it leaves comes first."""
    need = [0] * problem.count
    sorted_before: list[tuple[int, ...]] = [()] * problem.count
    for node in _visit(range(problem.count), problem.predecessors):
        before = sorted(problem.predecessors[node], key=lambda n: (problem.alloc[n] - need[n], n))
        sorted_before[node] = tuple(before)
        held = 0
        for other in before:
            need[node] = max(need[node], held + need[other])
            held += problem.alloc[other]
        need[node] = max(need[node], held + problem.rise[node])
    ends = [node for node in range(problem.count) if not problem.successors[node]]
    return _visit(ends, sorted_before)


def least_peak_last(problem: OrderingProblem) -> list[int]:
    """Fill the order from its end: last comes what leaves the least memory before it, within the peak."""
    growing = GrowingOrder(problem, backwards=True)
    peak = max(problem.final_bytes, problem.initial_bytes)
    return _greedy(growing, _Ends(growing), peak)[::-1]


def _greedy(growing: GrowingOrder, ready: ReadyNodes | _Ends, peak: int) -> list[int]:
    """Take the best of what is ready until nothing is left; what stays under `peak` is free."""
    for node in growing.ready():
        ready.add(node, growing.growth[node])
    order: list[int] = []
    while len(order) < len(growing.growth):
        node = ready.pop_best(peak - growing.memory)
        order.append(node)
        peak = max(peak, growing.memory + growing.needed(node))
        for other in growing.take(node):
            ready.add(other, growing.growth[other])
    return order


class _Ends:
    """The nodes that can come last, by what memory before them would be and by what they need."""

    _TRIES = 8
    """How many of the best are asked whether they fit, before the one that needs least is taken."""

    def __init__(self, growing: GrowingOrder) -> None:
        self._growing = growing
        self._rise, self._before = growing.rise, growing.growth
        self._by_memory: list[tuple[int, int]] = []
        self._by_need: list[tuple[int, int, int]] = []

    def add(self, node: int, before: int) -> None:
        heappush(self._by_memory, (before, node))
        heappush(self._by_need, (before + self._rise[node], before, node))

    def pop_best(self, room: int) -> int:
        """Take out the node that leaves least memory before it among those that need at most `room`."""
        tried: list[tuple[int, int]] = []
        found = -1
        while self._by_memory and len(tried) < self._TRIES and found < 0:
            before, node = heappop(self._by_memory)
            if self._growing.is_taken(node) or before != self._before[node]:
                continue
            if before + self._rise[node] <= room:
                found = node
            else:
                tried.append((before, node))
        for entry in tried:
            heappush(self._by_memory, entry)
        while found < 0:
            _, before, node = heappop(self._by_need)
            if not self._growing.is_taken(node) and before == self._before[node]:
                found = node
        return found


def _visit(starts: Sequence[int], sorted_before: Sequence[tuple[int, ...]]) -> list[int]:
    """Visit nodes from `starts`, each after what it needs in the given sequence, without recursion."""
    order: list[int] = []
    seen = [False] * len(sorted_before)
    for start in starts:
        if seen[start]:
            continue
        seen[start] = True
        path = [(start, iter(sorted_before[start]))]
        while path:
            node, rest = path[-1]
            for before in rest:
                if not seen[before]:
                    seen[before] = True
                    path.append((before, iter(sorted_before[before])))
                    break
            else:
                path.pop()
                order.append(node)
    return order
