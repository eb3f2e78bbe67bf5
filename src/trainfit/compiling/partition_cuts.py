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
from collections.abc import Collection, Sequence

from trainfit.basics.maximum_flow import UNLIMITED, FlowNetwork
from trainfit.compiling.recompute_problem import Fusing, RecomputeProblem, Role

_ROUNDING = 1e-16
"""Seconds: less than this is rounding."""
_LEAST_SECONDS = 1e-13
"""Of running anything again: of equally cheap choices the one that runs less."""


_SHARES = (0.1, 0.35, 0.7, 1.0)
"""Of the places where the bytes that cross are fewest near them, those with the fewest."""


_MOST_PLACES = 120
"""More than so many are thinned out."""


class PartitionCuts:
    """Answers for one problem: the cheapest choice at a price, and places at which forward is divided."""

    def __init__(self, problem: RecomputeProblem, fused_share: float) -> None:
        """Prepare the network; pointwise nodes cost `fused_share` of their seconds."""
        self.problem = problem
        self._useful = problem.useful
        self._number = {node: place for place, node in enumerate(self._useful)}
        self._seconds = [
            problem.nodes[n].seconds * (fused_share if problem.nodes[n].fusing is Fusing.POINTWISE else 1.0)
            for n in self._useful
        ]

    def cheapest(self, seconds_per_byte: float, given: Collection[int] = ()) -> frozenset[int] | None:
        """Return the nodes to keep at a price, `given` kept for nothing; None if backward cannot have all."""
        count = len(self._useful)
        source, sink = 2 * count, 2 * count + 1
        network = FlowNetwork(2 * count + 2, _ROUNDING)
        wanted = set(self.problem.wanted)
        for place, number in enumerate(self._useful):
            node = self.problem.nodes[number]
            again, needed = place, count + place
            network.connect(
                again, sink, self._seconds[place] + _LEAST_SECONDS if node.repeatable else UNLIMITED
            )
            if number in wanted:
                network.connect(source, needed, UNLIMITED)
            price = 0.0 if number in given else self.problem.own_bytes[number] * seconds_per_byte
            network.connect(needed, again, price if node.keepable else UNLIMITED)
            if node.repeatable:
                for read in node.reads:
                    if read in self._number:
                        network.connect(again, count + self._number[read], UNLIMITED)
        network.fill(source, sink)
        if network.sent == UNLIMITED:
            return None
        reached = network.reached_from(source)
        return frozenset(
            number
            for place, number in enumerate(self._useful)
            if reached[count + place] and not reached[place]
        )


def crossing_values(problem: RecomputeProblem, place: int) -> frozenset[int]:
    """Return the forward nodes before a place that forward nodes after it read: what has to be kept there.

    Of a view what it is a view of, and of what cannot be kept what it is computed from.
    """
    found: set[int] = set()
    pending = [
        read
        for number in problem.useful
        if number >= place
        for read in problem.nodes[number].reads
        if read < place
    ]
    seen: set[int] = set()
    while pending:
        number = pending.pop()
        node = problem.nodes[number]
        if number in seen or node.role is not Role.FORWARD:
            continue
        seen.add(number)
        if node.keepable:
            found.add(number)
        else:
            pending += node.reads
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
