"""Find the order with the smallest peak: heuristics first, then proofs and searches where they can help.

1. The given order and torch's three, and two of ours; each is tightened, which never makes it worse.
2. A bound from minimum cuts at the nodes where the best of them has its peak. If it is reached: optimal.
3. Split where every order has to pass; in each part whose peak is above the bound, an exact search from both
   ends, and where that takes too many sets, beam searches for the core that the two ends leave.

The default effort is counted in sets and moves looked at, not in seconds, so that a result is the same on
every machine. With `seconds` the effort doubles until the order is optimal or the time is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trainfit.errors import OptionError
from trainfit.ordering.beam import Beam
from trainfit.ordering.bound import CutBounds
from trainfit.ordering.directions import both_directions
from trainfit.ordering.exact import Searched, search
from trainfit.ordering.found_order import Order
from trainfit.ordering.graph import BufferGraph
from trainfit.ordering.heuristics import (
    breadth_first,
    deepest_need_first,
    depth_first,
    least_peak_first,
    least_peak_last,
    visit_order_of,
)
from trainfit.ordering.ordering_problem import OrderingProblem, is_possible, peak_of, problem_of, step_bytes
from trainfit.ordering.splitting import Part, Splitter
from trainfit.ordering.tighten import tighten

TORCH_METHODS = ("baseline", "lpmf", "bfs", "dfs")
_CUT_WORK = 600_000
_MOST_CUT_EFFORT = 8
"""A cut does not ask whether to stop, so that its work is limited."""
_SEARCH_MOVES = 150_000
_BEAM_MOVES = 120_000
_SMALL = 700
_MOST_NODES_SEARCHED = 6_000
"""Sets are kept as bits, so that time and memory of a search grow with the square of this."""
_MOST_NODES_TIGHTENED_OFTEN = 20_000
_MOST_NODES_TIGHTENED_FROM_ALL = 2_000
_MOST_ROUNDS = 6
_MOST_EFFORT = 1 << 20


def heuristic_orders(graph: BufferGraph, problem: OrderingProblem) -> dict[str, list[int]]:
    """Return the given order and the three that torch would try, by torch's names for them."""
    return {
        "baseline": list(graph.baseline),
        "lpmf": least_peak_first(problem, graph.output_bytes),
        "bfs": breadth_first(problem),
        "dfs": depth_first(problem, visit_order_of(graph, problem)),
    }


def best_order(graph: BufferGraph, *, seconds: float | None = None) -> Order:
    """Return the best order that is found, never worse than the given one and torch's three.

    Without `seconds` the effort is fixed. With it, the search goes on until the order is proved optimal or
    the time is over; what it finds then depends on the machine.
    """
    if seconds is not None and not 0 < seconds < float("inf"):
        raise OptionError(f"the time limit must be a number of seconds above zero, got {seconds}.")
    begin = time.perf_counter()
    deadline = None if seconds is None else begin + seconds
    problem = problem_of(graph)
    solver = _Solver(problem, lambda: deadline is not None and time.perf_counter() > deadline)
    solver.heuristics(heuristic_orders(graph, problem))
    effort = 1
    while not solver.optimal and not solver.stop():
        solver.improve(effort)
        if deadline is None or effort >= _MOST_EFFORT:
            break
        effort *= 2
    assert is_possible(problem, solver.order), "the order that was found is not a possible one"
    return Order(
        graph=graph,
        steps=tuple(solver.order),
        peak_bytes=solver.peak,
        lower_bound_bytes=min(solver.bound, solver.peak),
        method=solver.method,
        methods=solver.methods,
        seconds=time.perf_counter() - begin,
    )


@dataclass
class _Solver:
    """The best order so far, and the best bound."""

    problem: OrderingProblem
    stop: Callable[[], bool]
    order: list[int] = field(default_factory=list)
    peak: int = -1
    bound: int = 0
    method: str = ""
    methods: dict[str, int] = field(default_factory=dict)

    @property
    def optimal(self) -> bool:
        return self.peak <= self.bound

    def offer(self, method: str, order: Sequence[int], peak: int) -> None:
        """Take an order if it is better than the best so far, and note what the method reached."""
        self.methods[method] = min(peak, self.methods.get(method, peak))
        if peak < self.peak or not self.method:
            self.order, self.peak, self.method = list(order), peak, method

    def heuristics(self, orders: dict[str, list[int]]) -> None:
        """Try the one-pass methods, tighten them, and bound the result."""
        problem = self.problem
        for method, order in orders.items():
            self.offer(method, order, peak_of(problem, order))
        self.bound = max(problem.initial_bytes, problem.final_bytes)
        starts, rounds = [self.order], 2
        if problem.count <= _MOST_NODES_TIGHTENED_OFTEN:
            starts += [least_peak_last(problem), deepest_need_first(problem)]
            rounds = _MOST_ROUNDS
        if problem.count <= _MOST_NODES_TIGHTENED_FROM_ALL:
            starts += [order for order in orders.values() if order != self.order]
        for start in starts:
            if not self.optimal and not self.stop():
                self.offer("tightened", *tighten(problem, start, rounds))

    def improve(self, effort: int) -> None:
        """Raise the bound and lower the peak, part by part, where the peak is above the bound."""
        splitter = Splitter(self.problem, self.order)
        order = list(self.order)
        ranges = [(splitter.peak(start, end), start, end) for start, end in splitter.ranges()]
        # The part with the largest peak first: what is proved there may make the others unnecessary.
        ranges.sort(key=lambda entry: (-entry[0], entry[1]))
        methods = []
        for peak, start, end in ranges:
            if peak <= self.bound:
                break
            part = _PartSolver(splitter.part(start, end), self.bound, effort, self.stop)
            part.run()
            self.bound = max(self.bound, part.bound)
            order[start:end] = part.order()
            methods.append(part.method)
        method = next(filter(None, methods), "")
        if method:
            self.offer(method, order, peak_of(self.problem, order))


class _PartSolver:
    """One part: its own order, peak and bound."""

    def __init__(self, part: Part, at_least: int, effort: int, stop: Callable[[], bool]) -> None:
        self.part = part
        self.problem = part.problem
        self.at_least = at_least
        """No peak below this matters: some other part, or the end, needs as much."""
        self.effort = effort
        self.stop = stop
        self.steps = list(range(self.problem.count))
        self.peak = peak_of(self.problem, self.steps)
        self.bound = 0
        self.moves_left = 0
        self.method = ""
        """What improved the part, if anything did."""

    def order(self) -> list[int]:
        """Return the part's nodes by their numbers in the whole problem."""
        return [self.part.nodes[step] for step in self.steps]

    @property
    def needed(self) -> int:
        """What is proved to be needed, here or elsewhere: a peak of that much is good enough."""
        return max(self.bound, self.at_least)

    def run(self) -> None:
        """Improve the part until its peak is proved or the effort is used up."""
        if self.peak <= self.needed or self.stop():
            return
        cuts = CutBounds(self.problem, _CUT_WORK * min(self.effort, _MOST_CUT_EFFORT))
        self._cut_at_peaks(cuts)
        if self.peak <= self.needed or self.problem.count > _MOST_NODES_SEARCHED:
            return
        found = self._search()
        if self.peak > self.needed:
            self._beams(found)
            self._cut_at_peaks(cuts)

    def _moves(self, of_small: int) -> int:
        """Return how many moves may be looked at: fewer in a large problem, whose sets have more bits."""
        return self.effort * of_small * _SMALL // (_SMALL + self.problem.count)

    def _take(self, method: str, order: Sequence[int]) -> None:
        steps, peak = tighten(self.problem, order)
        if peak < self.peak:
            self.steps, self.peak, self.method = steps, peak, method

    def _cut_at_peaks(self, cuts: CutBounds) -> None:
        """Bound the part by cuts at the nodes where it needs most."""
        memory = step_bytes(self.problem, self.steps)
        highest = sorted(range(len(memory)), key=lambda step: (-memory[step], step))
        ways = [(step, cuts.at) for step in highest[:_MOST_CUTS]]
        ways += [(step, cuts.at_twins_of) for step in highest[:_MOST_TWINS]]
        for step, cut in ways:
            if memory[step] > max(self.needed, cuts.bound) and not self.stop():
                cut(self.steps[step])
        if memory[highest[0]] > max(self.needed, cuts.bound) and not self.stop():
            cuts.at_largest()
        self.bound = max(self.bound, cuts.bound)

    def _search(self) -> Searched:
        moves = self._moves(_SEARCH_MOVES)
        found = search(self.problem, below=self.peak, at_least=self.needed, moves=moves, stop=self.stop)
        self.bound = max(self.bound, found.bound)
        if found.order is not None:
            self._take("search", found.order)
        return found

    def _beams(self, found: Searched) -> None:
        """Search the core between the two ends that are known to be good, from both sides."""
        settled = set(found.first) | set(found.last)
        core = [step for step in self.steps if step not in settled]
        order = [*found.first, *core, *found.last]
        middle = Splitter(self.problem, order).part(len(found.first), len(order) - len(found.last))
        beams = [Beam(direction) for direction in both_directions(middle.problem)]
        self.moves_left = self._moves(_BEAM_MOVES)
        width = 1
        while self.moves_left > 0 and self.peak > self.needed and not self.stop():
            for beam in beams:
                for share in _LIMITS:
                    self._beam(beam, share, width, middle, found)
            width *= 4

    def _beam(self, beam: Beam, share: float, width: int, middle: Part, found: Searched) -> None:
        if self.peak <= self.needed or self.moves_left <= 0 or self.stop():
            return
        limit = self.needed + int((self.peak - 1 - self.needed) * share)
        before = beam.work
        order = beam.search(limit, width, self.moves_left, self.stop)
        self.moves_left -= beam.work - before + 1
        if order is not None:
            inner = [middle.nodes[step] for step in order]
            self._take("beam", [*found.first, *inner, *found.last])


_MOST_CUTS = 12
_MOST_TWINS = 6
_LIMITS = (0.0, 0.5, 1.0)
"""Beams try these places between what is proved to be needed and what is reached already."""
