"""The fastest partition within limits: cuts at several prices, of forward divided in several ways, improved.

1. For every way to divide forward, the price is bisected for the cheapest cut that keeps the limits.
2. Stretches are independent of each other: between the cut that just fits and the next faster one, as many
   stretches as fit take the faster choice, the last ones of forward first (backward lets go of them first).
3. What is computed again is kept after all where that fits, most seconds per byte first; and what is kept
   and not worth its bytes is let go.
4. Expensive nodes are forbidden to run again, one by one, where the cut that is cheapest then still fits; or
   are kept in the place of others.

Every candidate is judged by `PartitionMemory`, never by what the cut believes. The same problem and limits
give the same partition on every machine: the effort is counted, not timed.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence

from trainfit.compiling.cut_corners import look_at_corners
from trainfit.compiling.fast_partitions import FUSED_SHARE
from trainfit.compiling.pareto_front import ParetoFront
from trainfit.compiling.partition_cuts import CrossingValues, PartitionCuts, divided, places_to_divide
from trainfit.compiling.partition_memory import PartitionMemory
from trainfit.compiling.partition_swaps import PartitionSwaps
from trainfit.compiling.recompute_problem import GraphLimits, Partition, RecomputeProblem

_PRICES = 31
"""Prices per byte that are looked at, the same for all limits; each is a constant times the one before."""
_PRICE_RANGE = 1e4
"""How far prices per byte are looked for from what computing all of forward again takes per byte."""
_MIXED = 2
"""In large graphs, of how many ways to divide forward the stretches take different prices."""
_ROUNDS = 6
"""How often as many values as fit are kept at once."""
_MOST_MOVES, _LEAST_MOVES = 60, 6
"""How many single values are tried in the end, in small graphs and in the largest."""
_LARGE = 1000
"""Useful nodes above which fewer ways are tried, so that a large graph is planned in seconds."""
_FILLING, _LEAST_FILLING = 350, 40
"""How many choices are judged around those that no other beats, in small graphs and in the largest."""
_CORNERS = 48
"""How many prices are looked at where two cuts of all of forward cost the same."""
_LEVELS, _LARGE_LEVELS = 10, 3
"""Limits that are searched for, whatever is asked, between the smallest peak and that of the fastest."""


_END_PRICES = {0.0: 1e-19, math.inf: 1e3}
"""The two ends: time alone decides, and bytes alone."""

Figures = tuple[float, int, int, int]
Divided = tuple[float, tuple[int, ...], tuple[Partition, Partition]]
"""Seconds, the places where forward is divided, and the partitions at two prices."""


class PartitionSearch:
    """Finds partitions of one problem, for as many limits as are asked for."""

    def __init__(self, problem: RecomputeProblem) -> None:
        """Begin with the two ends of each way to divide forward: time alone decides, or bytes alone."""
        self.problem = problem
        self.memory = PartitionMemory(problem)
        self._cuts = PartitionCuts(problem, FUSED_SHARE, self.memory.rows)
        self._is_large = len(problem.useful) > _LARGE
        # What one move takes grows with the graph.
        self._moves = max(_LEAST_MOVES, min(_MOST_MOVES, 60 * _LARGE // 2 // max(len(problem.useful), 1)))
        seconds = sum(problem.nodes[n].seconds for n in problem.useful)
        size = sum(problem.own_bytes[n] for n in problem.useful)
        usual = max(seconds, 1e-12) / max(size, 1)
        self._prices = [usual * _PRICE_RANGE ** (2 * n / (_PRICES - 1) - 1) for n in range(_PRICES)]
        self._swaps = PartitionSwaps(self.memory, self._judge, self._moves)
        self._values = CrossingValues(problem)
        self._crossings: dict[tuple[int, ...], frozenset[int]] = {}
        self._judged = 0
        self._known: dict[frozenset[int], Partition] = {}
        self._front = self._everywhere = ParetoFront(lambda partition: partition.peak_bytes)
        self._places = places_to_divide(problem)
        self._answers: dict[tuple[tuple[int, ...], float], Partition | None] = {}
        self._looked = False
        for places in self._divisions:
            for price in (0.0, math.inf):
                self._at(places, price)

    @property
    def partitions(self) -> list[Partition]:
        """All that were looked at and that no other beats in both peak and seconds; smallest peak first."""
        return self._front.partitions

    @property
    def trade_offs(self) -> list[Partition]:
        """All that were looked at and that no other beats in memory held, peaks and seconds; fastest last.

        Graphs that share a budget choose among them: what one of them holds is alive while another runs.
        """
        known = sorted(set(self._known.values()), key=lambda p: (-p.seconds, p.held_bytes, p.kept))
        figures = [(p.seconds, p.held_bytes, p.forward_peak_bytes, p.backward_peak_bytes) for p in known]
        found: list[tuple[Figures, Partition]] = []
        for partition, mine in zip(known, figures):
            better = (o for o in figures if o != mine and all(a <= b for a, b in zip(o, mine)))
            if next(better, None) is None and (not found or found[-1][0] != mine):
                found.append((mine, partition))
        return [partition for _, partition in found]

    def candidates(self, limits: GraphLimits, most: int) -> list[Partition]:
        """Return about so many partitions to choose from, fastest first, each with less above the limits.

        For limits that are all the same these are the same partitions whatever the limit is. So whoever takes
        the first that fits never takes a slower one for a higher limit.
        """
        self.look_everywhere()
        found = self._everywhere.partitions
        if not limits.are_same:
            front = ParetoFront(lambda partition: partition.excess(limits))
            for partition in self._known.values():
                front.add(partition)
            found = front.partitions
        if len(found) > most:
            low, high = found[0].excess(limits), found[-1].excess(limits)
            wanted = [low + (high - low) * n / (most - 1) for n in range(most)]
            above = [p.excess(limits) for p in found]
            # Of each step the fastest; the steps begin and end with what is there.
            taken = {bisect.bisect_right(above, w) - 1 for w in wanted}
            found = [found[n] for n in sorted(taken)]
        return found[::-1]

    def look_everywhere(self) -> None:
        """Look for partitions between the smallest peak and the fastest, so that others can choose."""
        if self._looked:
            return
        self._looked = True
        self._look()
        self._everywhere = self._front.copy()

    def _look(self) -> None:
        """Look for the smallest, then from the fastest down, at a row of limits, and where gaps are left."""
        self.fastest(GraphLimits.same(0.0))
        known = self.partitions
        if len(known) < 2:
            return
        self._swaps.go_down(known[-1])
        low, high = known[0].peak_bytes, known[-1].peak_bytes
        levels = _LARGE_LEVELS if self._is_large else _LEVELS
        for number in range(levels):
            self._cut(GraphLimits.same(low + (high - low) * number / levels), mixed=_MIXED)
        look_at_corners(functools.partial(self._at, ()), _CORNERS)
        useful = len(self.problem.useful)
        self._fill_gaps(max(_LEAST_FILLING, min(_FILLING, _FILLING * _LARGE // (2 * useful))))

    def _cut(self, limits: GraphLimits, mixed: int | None = None) -> list[Divided]:
        """Return the ways to divide forward with the price that just fits and the one below, fastest first.

        Of some of them the stretches take different prices.
        """
        found = [(self._bisect(places, limits), places) for places in self._divisions]
        able = sorted((ends[0].seconds, places, ends) for ends, places in found if ends is not None)
        for _, places, ends in able[:mixed]:
            self._mix(places, *ends, limits)
        return able

    def _fill_gaps(self, most: int) -> None:
        """Try what lies around partitions that no other beats, first where limits may lie between two."""
        tried: set[tuple[int, ...]] = set()
        most += self._judged
        while self._judged < most:
            partition = next((p for p in self._front.widest_gaps() if p.kept not in tried), None)
            if partition is None:
                return
            tried.add(partition.kept)
            self._swaps.try_around(partition)

    def smallest(self) -> Partition | None:
        """Return the partition with the smallest peak that was found."""
        return min(self._known.values(), key=lambda p: (p.peak_bytes, p.seconds), default=None)

    def fastest(self, limits: GraphLimits) -> Partition | None:
        """Return the fastest partition found within the limits; None if none is."""
        able = self._cut(limits, _MIXED if self._is_large else None)
        for _, places, ends in able[:_MIXED]:
            self._run_once(places, ends[0], limits)
        best = self._best(limits)
        if best is None and (nearest := self.nearest(limits)) is not None:
            best = self._swaps.smaller(nearest, limits)
        return None if best is None else self._improved(self._swaps.swapped(best, limits), limits)

    def nearest(self, limits: GraphLimits) -> Partition | None:
        """Return what exceeds the limits the least, of all that were looked at."""
        return min(self._known.values(), key=lambda p: (p.excess(limits), p.seconds), default=None)

    def _best(self, limits: GraphLimits) -> Partition | None:
        if limits.are_same:
            return self._front.fastest(limits.backward_bytes)
        fitting = [p for p in self._known.values() if p.excess(limits) <= 0]
        return min(fitting, key=lambda p: (p.seconds, p.peak_bytes, p.kept), default=None)

    @functools.cached_property
    def _divisions(self) -> list[tuple[int, ...]]:
        """Return the ways in which forward is divided, from not at all to at every place."""
        ways: list[tuple[int, ...]] = [()]
        for places in self._places[:2] if self._is_large else self._places:
            most = len(places) + 1
            count = 2.0
            while count < most:
                ways.append(tuple(divided(self.problem, places, round(count))))
                count *= 3.0 if self._is_large else 1.5
            ways.append(tuple(places))
        return list(dict.fromkeys(ways))

    def _judge(self, chosen: Collection[int]) -> Partition | None:
        key = frozenset(chosen)
        if key not in self._known:
            self._judged += 1
            found = self.memory.partition(key)
            if found is None:
                return None
            kept = frozenset(found.kept)
            if kept in self._known:
                found = self._known[kept]
            else:
                self._known[kept] = found
                self._front.add(found)
            self._known[key] = found
        return self._known[key]

    def _at(self, places: tuple[int, ...], price: float) -> Partition | None:
        """Return the cheapest partition at a price of one way to divide forward."""
        if (places, price) not in self._answers:
            given = self._crossing(places)
            chosen = self._cuts.cheapest(_END_PRICES.get(price, price), given)
            self._answers[places, price] = None if chosen is None else self._judge(chosen | given)
        return self._answers[places, price]

    def _crossing(self, places: tuple[int, ...]) -> frozenset[int]:
        if places not in self._crossings:
            self._crossings[places] = self._values.at(places)
        return self._crossings[places]

    def _bisect(self, places: tuple[int, ...], limits: GraphLimits) -> tuple[Partition, Partition] | None:
        """Return the partition at the lowest price that keeps the limits, and the one below that price."""
        fast, small = self._at(places, 0.0), self._at(places, math.inf)
        if fast is None or small is None or fast.excess(limits) <= 0 or small.excess(limits) > 0:
            return None
        low, high = -1, _PRICES
        while high - low > 1:
            middle = (low + high) // 2
            found = self._at(places, self._prices[middle])
            if found is None:
                return None
            if found.excess(limits) <= 0:
                high, small = middle, found
            else:
                low, fast = middle, found
        return small, fast

    def _mix(self, places: tuple[int, ...], small: Partition, fast: Partition, limits: GraphLimits) -> None:
        """Let as many stretches as fit take the faster choice: from the last on, then from the first on."""
        given = self._crossing(places)
        borders = self._places[-1] if self._places else []
        groups = [_of_stretches(borders, partition.kept) for partition in (small, fast)]
        order = [n for n in range(len(borders), -1, -1) if groups[0][n] != groups[1][n]]

        def mixed(faster: Sequence[int]) -> set[int]:
            taken = (groups[n in faster][n] for n in range(len(borders) + 1))
            return {*given, *itertools.chain.from_iterable(taken)}

        self._most(len(order), lambda count: mixed(order[:count]), limits)
        if not self._is_large:
            self._most(len(order), lambda count: mixed(order[len(order) - count :]), limits)

    def _run_once(self, places: tuple[int, ...], small: Partition, limits: GraphLimits) -> None:
        """Forbid expensive nodes one by one to run again, where the cut that then is cheapest still fits."""
        given = self._crossing(places)
        price = next(price for (p, price), q in self._answers.items() if p == places and q is small)
        price = _END_PRICES.get(price, price)
        nodes = self.problem.nodes

        def cut(once: frozenset[int]) -> Partition | None:
            chosen = self._cuts.cheapest(price, given, once)
            found = None if chosen is None else self._judge(chosen | given)
            return found if found is not None and found.excess(limits) <= 0 else None

        again = self.memory.again(small)
        dearest = sorted((n for n in again if nodes[n].seconds), key=lambda n: -nodes[n].seconds)
        worth = []
        for number in dearest[: self._moves]:
            found = cut(frozenset((number,)))
            if found is not None and found.seconds < small.seconds:
                bytes_ = max(found.kept_bytes - small.kept_bytes, 1)
                worth.append(((small.seconds - found.seconds) / bytes_, number))
        once: frozenset[int] = frozenset()
        best = small
        for _, number in sorted(worth, reverse=True):
            found = cut(once | {number})
            if found is not None and found.seconds < best.seconds:
                once, best = once | {number}, found

    def _most(self, count: int, chosen: Callable[[int], Collection[int]], limits: GraphLimits) -> int:
        """Return the largest number up to `count` whose choice fits, as far as halving finds it."""
        low, high = 0, count + 1
        while high - low > 1:
            middle = (low + high) // 2
            found = self._judge(chosen(middle))
            if found is not None and found.excess(limits) <= 0:
                low = middle
            else:
                high = middle
        return low

    def _improved(self, best: Partition, limits: GraphLimits) -> Partition:
        """Keep more where it fits: many values at once, then one by one; then see what can be let go."""
        worth = self.memory.worth_keeping(best)
        for _ in range(_ROUNDS if not self._is_large else 2):
            kept, waiting = frozenset(best.kept), tuple(worth)
            count = self._most(len(waiting), lambda n, k=kept, w=waiting: k | {*w[:n]}, limits)  # type: ignore[misc]
            if count:
                best = min(best, self._judge(kept | {*waiting[:count]}) or best, key=lambda p: p.seconds)
            # The next one is what does not fit: it is passed over.
            again = set(self.memory.again(best))
            worth = [n for n in waiting[count + 1 :] if n in again]
            if not worth:
                break
        moves = 0
        again = set(self.memory.again(best))
        for number in self.memory.worth_keeping(best):
            if moves >= self._moves:
                break
            if number not in again:
                continue
            moves += 1
            found = self._judge({*best.kept, number})
            if found is not None and found.excess(limits) <= 0 and found.seconds < best.seconds:
                best = found
                again = set(self.memory.again(best))
        return self._best(limits) or best


def _of_stretches(places: Sequence[int], kept: Collection[int]) -> list[tuple[int, ...]]:
    """Return the kept nodes of each stretch."""
    found: list[list[int]] = [[] for _ in range(len(places) + 1)]
    for number in sorted(kept):
        found[bisect.bisect_right(places, number)].append(number)
    return [tuple(numbers) for numbers in found]
