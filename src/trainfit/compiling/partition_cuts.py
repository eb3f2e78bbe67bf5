"""The cheapest choice of kept values for one price per byte: a minimum cut, with places where it is divided.

Of each forward value it is decided whether backward needs it, and of each node whether it runs again. A value
that is needed and does not come of a node that runs again is kept, which costs its bytes times the price; a
node that runs again costs its seconds and needs what it reads.

A cut alone knows nothing of when memory is alive: with a high price it keeps next to nothing, and everything
that is computed again is alive at once when backward begins. So forward is divided into stretches at places
where few bytes cross. What crosses is kept, and each stretch is computed again by itself.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable, Sequence

from trainfit.basics.maximum_flow import UNLIMITED, FlowNetwork
from trainfit.compiling.recompute_problem import Fusing, RecomputeProblem

_ROUNDING = 1e-16
"""Seconds: less than this is rounding."""
_LEAST_SECONDS = 1e-13
"""Of running anything again: of equally cheap choices the one that runs less."""


_SHARES = (0.1, 0.35, 0.7, 1.0)
"""Of the places where the bytes that cross are fewest near them, those with the fewest."""


_MOST_PLACES = 120
"""More than so many are thinned out."""


class PartitionCuts:
    """Answers for one problem: the cheapest choice at a price.

    What is given divides the problem into parts that have nothing to do with each other. Parts that are the
    same (repeated blocks) are solved once, and a higher price goes on from the flow of a lower one.
    """

    def __init__(self, problem: RecomputeProblem, fused_share: float) -> None:
        """Prepare the network; pointwise nodes cost `fused_share` of their seconds."""
        self._problem = problem
        nodes = problem.nodes
        self._seconds = [
            node.seconds * (fused_share if node.fusing is Fusing.POINTWISE else 1.0) for node in nodes
        ]
        useful = set(problem.useful)
        self._stands_for = _what_views_stand_for(problem, useful)
        self._useful = [n for n in problem.useful if self._stands_for[n] == n]
        self._reads = {
            n: tuple(dict.fromkeys(self._stands_for[r] for r in nodes[n].reads if self._stands_for[r] >= 0))
            for n in self._useful
            if nodes[n].repeatable
        }
        self._wanted = {self._stands_for[n] for n in problem.wanted}
        self._networks: dict[tuple[object, ...], _PricedNetwork] = {}
        self._parts: dict[frozenset[int], list[tuple[_PricedNetwork, list[int]]]] = {}

    def cheapest(
        self,
        seconds_per_byte: float,
        given: frozenset[int] = frozenset(),
        once: frozenset[int] = frozenset(),
    ) -> frozenset[int] | None:
        """Return the nodes to keep at a price, `given` kept for nothing; None if backward cannot have all.

        What is in `once` must not run again.
        """
        if given not in self._parts:
            self._parts[given] = self._divided(given)
        found: list[int] = []
        for network, numbers in self._parts[given]:
            # Most parts have none of them, and are known.
            forbidden = () if once.isdisjoint(numbers) else [n for n, m in enumerate(numbers) if m in once]
            kept = network.cheapest(seconds_per_byte, tuple(forbidden))
            if kept is None:
                return None
            found += [numbers[place] for place in kept]
        return frozenset(found)

    def _divided(self, given: frozenset[int]) -> list[tuple[_PricedNetwork, list[int]]]:
        """Return the networks of the parts into which what is given divides the problem, with their nodes."""
        parent = {n: n for n in self._useful if n not in given}

        def root(number: int) -> int:
            while parent[number] != number:
                parent[number] = parent[parent[number]]
                number = parent[number]
            return number

        for number in parent:
            for read in self._reads.get(number, ()):
                if read in parent:
                    parent[root(number)] = root(read)
        parts: dict[int, list[int]] = {}
        for number in parent:
            parts.setdefault(root(number), []).append(number)
        return [
            (self._network(numbers), numbers)
            for numbers in parts.values()
            if not self._wanted.isdisjoint(numbers)
        ]

    def _network(self, numbers: list[int]) -> _PricedNetwork:
        nodes, sizes = self._problem.nodes, self._problem.own_bytes
        place = {number: at for at, number in enumerate(numbers)}
        key = tuple(
            (
                self._seconds[n] if nodes[n].repeatable else UNLIMITED,
                sizes[n] if nodes[n].keepable else -1,
                n in self._wanted,
                tuple(place[read] for read in self._reads.get(n, ()) if read in place),
            )
            for n in numbers
        )
        if key not in self._networks:
            self._networks[key] = _PricedNetwork(key)
        return self._networks[key]


def _what_views_stand_for(problem: RecomputeProblem, useful: Collection[int]) -> list[int]:
    """Return for each node the one that is needed when it is: of a view what it is a view of.

    -1 for what is always there.
    """
    found: list[int] = []
    for number, node in enumerate(problem.nodes):
        if number not in useful:
            found.append(-1)
            continue
        read = {found[r] for r in node.reads} - {-1}
        looked_through = node.repeatable and not node.keepable and not node.seconds and len(read) <= 1
        found.append(next(iter(read), -1) if looked_through else number)
    return found


class _PricedNetwork:
    """One part of the problem: for each node its seconds, bytes, whether it is wanted, and what it reads."""

    def __init__(self, nodes: Sequence[tuple[float, int, bool, tuple[int, ...]]]) -> None:
        self._count = count = len(nodes)
        network = FlowNetwork(2 * count + 2, _ROUNDING)
        self._priced: list[tuple[int, int]] = []
        self._running: list[int] = []
        """For each node the edge that costs its seconds."""
        for again, (seconds, size, wanted, reads) in enumerate(nodes):
            needed = count + again
            self._running.append(len(network.heads))
            network.connect(again, 2 * count + 1, seconds + _LEAST_SECONDS)
            if wanted:
                network.connect(2 * count, needed, UNLIMITED)
            if size >= 0:
                self._priced.append((len(network.heads), size))
            network.connect(needed, again, 0.0 if size >= 0 else UNLIMITED)
            for read in reads:
                network.connect(again, count + read, UNLIMITED)
        self._filled: list[tuple[float, FlowNetwork]] = [(0.0, network)]
        self._known: dict[tuple[float, tuple[int, ...]], tuple[int, ...] | None] = {}

    def cheapest(self, seconds_per_byte: float, once: tuple[int, ...] = ()) -> tuple[int, ...] | None:
        """Return the places of the nodes to keep; None if something that is wanted cannot be had.

        The nodes at the places `once` must not run again.
        """
        asked = seconds_per_byte, once
        if asked not in self._known:
            network = self._at(seconds_per_byte)
            if once and network.sent < UNLIMITED:
                network = network.with_more((self._running[place], UNLIMITED) for place in once)
                network.fill(2 * self._count, 2 * self._count + 1)
            kept: tuple[int, ...] | None = None
            if network.sent < UNLIMITED:
                reached = network.reached_from(2 * self._count)
                kept = tuple(n for n in range(self._count) if reached[self._count + n] and not reached[n])
            self._known[asked] = kept
        return self._known[asked]

    def _at(self, seconds_per_byte: float) -> FlowNetwork:
        """Return the network filled at a price, from the one at the next lower price that is known."""
        at = bisect.bisect_right(self._filled, seconds_per_byte, key=lambda filled: filled[0])
        price, network = self._filled[at - 1]
        if price == seconds_per_byte:
            return network
        more = seconds_per_byte - price
        network = network.with_more((edge, size * more) for edge, size in self._priced)
        network.fill(2 * self._count, 2 * self._count + 1)
        if network.sent < UNLIMITED:
            self._filled.insert(at, (seconds_per_byte, network))
        return network


class CrossingValues:
    """What has to be kept where forward is divided: what is read after a place and computed before it."""

    def __init__(self, problem: RecomputeProblem) -> None:
        """Find the first and the last place of each value that can be kept.

        Of a view what it is a view of counts, and of what cannot be kept what it is computed from.
        """
        behind: dict[int, frozenset[int]] = {}
        last: dict[int, int] = {}
        for number in problem.useful:
            node = problem.nodes[number]
            found = frozenset[int]().union(*(behind.get(read, ()) for read in node.reads))
            for value in found:
                last[value] = number
            behind[number] = frozenset((number,)) if node.keepable else found
        self._last = sorted(last.items())

    def at(self, places: Iterable[int]) -> frozenset[int]:
        """Return what crosses any of these places, which are in order."""
        ordered = list(places)
        found = []
        for number, last in self._last:
            following = bisect.bisect_right(ordered, number)
            if following < len(ordered) and ordered[following] <= last:
                found.append(number)
        return frozenset(found)


def crossing_bytes(problem: RecomputeProblem) -> list[int]:
    """Return for each place in the graph the bytes that useful forward nodes after it read from before it."""
    nodes = problem.nodes
    change = [0] * (len(nodes) + 1)
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for number in problem.useful:
        for storage in nodes[number].makes:
            first.setdefault(storage, number)
        for read in nodes[number].reads:
            for storage in nodes[read].storages:
                last[storage] = number
    for storage, made in first.items():
        if last.get(storage, made) > made and storage not in problem.input_storages:
            change[made + 1] += problem.sizes[storage]
            change[last[storage] + 1] -= problem.sizes[storage]
    found, total = [], 0
    for step in change[:-1]:
        total += step
        found.append(total)
    return found


def places_to_divide(problem: RecomputeProblem) -> list[list[int]]:
    """Return lists of places where few bytes cross: no more than at the places before and after; in order.

    The first list has those with the fewest bytes, each further one also those with more.
    """
    useful = problem.useful
    if len(useful) < 3:
        return []
    crossing = crossing_bytes(problem)
    found: list[int] = []
    row: list[int] = []
    # Rows of places where the same bytes cross, and where more cross before and after the row.
    falling = True
    for before, here, after in zip(useful, useful[1:], [*useful[2:], None]):
        if problem.nodes[before].makes:
            row.append(here)
        if after is None or crossing[after] > crossing[here]:
            found += row if falling and row else [here] if falling else []
            row, falling = [], False
        elif crossing[after] < crossing[here]:
            row, falling = [], True
    found = found[:: max(1, -(-len(found) // _MOST_PLACES))]
    levels: list[list[int]] = []
    for share in _SHARES:
        ordered = sorted(crossing[place] for place in found)
        limit = ordered[int(share * (len(ordered) - 1))] if ordered else 0
        level = [place for place in found if crossing[place] <= limit]
        if level and level not in levels:
            levels.append(level)
    return levels


def divided(problem: RecomputeProblem, places: Sequence[int], stretches: int) -> list[int]:
    """Return places that divide forward into about so many stretches of equal bytes that backward wants."""
    if stretches <= 1 or not places:
        return []
    wanted = set(problem.wanted)
    until = [0]
    for number in problem.useful:
        counts = number in wanted or problem.nodes[number].fusing is Fusing.NOTHING
        until.append(until[-1] + (problem.own_bytes[number] if counts else 0))
    filled = [until[bisect.bisect_left(problem.useful, place)] for place in places]
    total = until[-1]
    chosen: list[int] = []
    for part in range(1, stretches):
        goal = total * part / stretches
        place = min(range(len(places)), key=lambda number: abs(filled[number] - goal))
        if places[place] not in chosen:
            chosen.append(places[place])
    return sorted(chosen)
