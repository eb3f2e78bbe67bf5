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

from trainfit.compiling.fast_partitions import GraphRows, PriceCuts
from trainfit.compiling.partition_memory import rows_of
from trainfit.compiling.recompute_problem import Fusing, RecomputeProblem

_SHARES = (0.1, 0.35, 0.7, 1.0)
"""Of the places where the bytes that cross are fewest near them, those with the fewest."""


_MOST_PLACES = 120
"""More than so many are thinned out."""


class PartitionCuts:
    """Answers for one problem: the cheapest choice at a price.

    What is given divides the problem into parts that have nothing to do with each other. Parts that are the
    same (repeated blocks) are solved once, and a higher price goes on from the flow of a lower one.
    """

    def __init__(self, problem: RecomputeProblem, fused_share: float, rows: GraphRows | None = None) -> None:
        """Prepare the network; pointwise nodes cost `fused_share` of their seconds."""
        seconds = [
            float(node.seconds * (fused_share if node.fusing is Fusing.POINTWISE else 1.0))
            for node in problem.nodes
        ]
        stands_for = _what_views_stand_for(problem, set(problem.useful))
        rows = rows_of(problem) if rows is None else rows
        self._cuts = PriceCuts(rows, seconds, stands_for, list(problem.wanted))

    def cheapest(
        self,
        seconds_per_byte: float,
        given: frozenset[int] = frozenset(),
        once: frozenset[int] = frozenset(),
    ) -> frozenset[int] | None:
        """Return the nodes to keep at a price, `given` kept for nothing; None if backward cannot have all.

        What is in `once` must not run again.
        """
        found = self._cuts.cheapest(float(seconds_per_byte), given, once)
        return None if found is None else frozenset(found)


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
