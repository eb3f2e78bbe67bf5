"""The smallest possible peak by searching sets of nodes from both ends; a bound where that takes too long.

Memory depends on which nodes have run, not on their order, so that the search goes over sets, for one limit
at a time: is there an order whose peak is at most the limit? It starts at a bound; when nothing is left to
try under the limit, that is proof, and the limit rises to the smallest figure that stopped it.

From the set it has come to, the search looks for a *valley*: any larger set with no more memory, reached
within the limit. Having found one it never comes back: memory is submodular, so that whatever an order does
later, it can do from the valley with no more memory at any step (where the valley is the lowest point between
the two sets, which a minimum cut ensures). The same holds from the end in reverse. Between the two ends
remains a core without valleys, which is searched in full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from trainfit.ordering.directions import Direction, both_directions, nodes_in
from trainfit.ordering.least_memory import best_closure
from trainfit.ordering.ordering_problem import OrderingProblem

_FIRST_MOVES = 256
"""How many moves each end may look at in its first try; then four times as many, and so on."""
_MOST_MOVES_AT_ONCE = 1 << 16
"""After this many moves at the latest, `stop` is asked."""


@dataclass(frozen=True)
class Searched:
    """What a search found.

    `order` is an order with the smallest peak, or None if that was not found below the limit. No order has
    a peak below `bound`. `first` and `last` are the nodes that some best order begins and ends with.
    """

    order: list[int] | None
    bound: int
    moves: int
    first: list[int]
    last: list[int]


def search(
    problem: OrderingProblem,
    *,
    below: int,
    at_least: int,
    moves: int,
    stop: Callable[[], bool] = lambda: False,
) -> Searched:
    """Look for the order with the smallest peak below `below`, looking at about that many moves.

    `at_least` is a bound that is known already. If every order is found to need `below` or more, that is the
    bound returned. `stop` is asked now and then whether to give up.
    """
    limit = max(at_least, problem.initial_bytes, problem.final_bytes)
    everything = (1 << problem.count) - 1
    ends = [_End(direction) for direction in both_directions(problem)]
    allowed = _FIRST_MOVES
    used = 0

    def result(order: list[int] | None) -> Searched:
        return Searched(order, min(limit, below), used, ends[0].nodes, ends[1].nodes[::-1])

    while limit < below:
        moved = False
        for end, other in (ends, ends[::-1]):
            outcome = end.advance(limit, min(allowed, moves - used), target=everything & ~other.taken)
            used += end.looked_at
            if end.taken | other.taken == everything:
                return result(ends[0].nodes + ends[1].nodes[::-1])
            if outcome == _MOVED:
                other.forget()
            if outcome == _STUCK:
                limit = end.next_limit
            moved |= outcome != _CUT_OFF
            if limit >= below:
                return result(None)
        if used >= moves or stop():
            return result(None)
        if not moved:
            allowed = min(4 * allowed, _MOST_MOVES_AT_ONCE)
    return result(None)


_MOVED, _STUCK, _CUT_OFF = range(3)


@dataclass
class _End:
    """One end of the search: how far it has come for good, and what it is looking at beyond."""

    direction: Direction
    taken: int = 0
    memory: int = 0
    ready: int = 0
    nodes: list[int] = field(default_factory=list)
    looked_at: int = 0
    next_limit: int = 0

    def __post_init__(self) -> None:
        self.memory, self.ready = self.direction.start_bytes, self.direction.ready()
        self.forget()

    def forget(self) -> None:
        """Start again from where this end stands, since it or the other end has moved."""
        self.reached: dict[int, tuple[int, int]] = {self.taken: (-1, -1)}
        """Each set with the set it was reached from, and the node taken then."""
        self.heap: list[tuple[int, int, int, int]] = [(self.memory, self.taken, -1, self.ready)]
        """Sets to look at: (memory, set, node taken last, what could be taken before that)."""
        self.postponed: list[tuple[int, int, int, int]] = []
        """What needs more than the limit: (needed, set, node, memory after it)."""

    def advance(self, limit: int, moves: int, target: int) -> int:
        """Look for a valley, or for the target, at about that many moves; go there if there is one."""
        self.looked_at = 0
        found = self._take_up_postponed(limit, target)
        while found is None and self.heap:
            if self.looked_at >= moves:
                return _CUT_OFF
            memory, taken, node, ready = heappop(self.heap)
            if node >= 0:
                ready = self.direction.take(node, taken, ready)[1]
            found = self._expand(memory, taken, ready & target, limit, target)
        if found is not None:
            self._go_to(found, whole=found == target)
            return _MOVED
        assert self.postponed, "the target cannot be reached at all"
        self.next_limit = self.postponed[0][0]
        return _STUCK

    def _take_up_postponed(self, limit: int, target: int) -> int | None:
        """Go on with what the limit now allows; return a valley or the target if it is among that."""
        while self.postponed and self.postponed[0][0] <= limit:
            _, taken, node, memory = heappop(self.postponed)
            reached = taken | 1 << node
            if reached not in self.reached:
                self.reached[reached] = (taken, node)
                if memory <= self.memory or reached == target:
                    return reached
                heappush(self.heap, (memory, reached, -1, self._ready_after(reached)))
        return None

    def _ready_after(self, taken: int) -> int:
        required = self.direction.required
        left = ((1 << len(required)) - 1) & ~taken
        return sum(1 << node for node in nodes_in(left) if not required[node] & ~taken)

    def _expand(self, memory: int, taken: int, ready: int, limit: int, target: int) -> int | None:
        """Look at what follows a set; return a valley or the target if it is among that."""
        direction, reached = self.direction, self.reached
        moves = []
        for node in nodes_in(ready):
            growth = direction.growth(node, taken)
            needed = direction.needed(node, memory, growth)
            if growth <= 0 and needed <= limit:
                # It costs nothing: whatever else could be done here can be done after it.
                moves = [(node, memory + growth, needed)]
                break
            moves.append((node, memory + growth, needed))
        self.looked_at += len(moves)
        for node, grown, needed in moves:
            after = taken | 1 << node
            if after in reached:
                continue
            if needed > limit:
                heappush(self.postponed, (needed, taken, node, grown))
                continue
            reached[after] = (taken, node)
            if grown <= self.memory or after == target:
                return after
            heappush(self.heap, (grown, after, node, ready))
        return None

    def _go_to(self, found: int, *, whole: bool) -> None:
        path: list[int] = []
        while found != self.taken:
            found, node = self.reached[found]
            path.append(node)
        path.reverse()
        for node in path if whole else self._lowest(path):
            self.memory += self.direction.growth(node, self.taken)
            self.taken, self.ready = self.direction.take(node, self.taken, self.ready)
            self.nodes.append(node)
        self.forget()

    def _lowest(self, path: list[int]) -> list[int]:
        """Return the part of a path that leads to the lowest point between here and its end."""
        if len(path) <= 1:
            return path
        problem, backwards = self.direction.problem, self.direction.backwards
        everything = (1 << problem.count) - 1
        inside = set(nodes_in(everything & ~self.taken if backwards else self.taken)) - set(path)
        runs = best_closure(problem, inside, set(path))
        return [node for node in path if (node in runs) != backwards] or path
