"""Find the fastest plan under a budget: curves of the regions, a choice among them, and its certificate."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from trainfit.costs.schedule import Schedule, Seconds, schedule
from trainfit.costs.table import CostTable
from trainfit.planning import certify, master
from trainfit.planning.baselines import blocks_of
from trainfit.planning.between import with_points_between
from trainfit.planning.certify import Unplanned
from trainfit.planning.curves import curve_of
from trainfit.planning.effects import Effect, effect_of
from trainfit.planning.master import MasterProblem, Option, Solution
from trainfit.planning.minimum_cut import Choice, choice_of
from trainfit.planning.regions import (
    RegionGraph,
    block_families,
    calls_in_pass,
    candidate_calls,
    chain_graph,
)
from trainfit.planning.replay import executor_seconds
from trainfit.planning.whole import can_be_whole, everything_again
from trainfit.plans import Plan
from trainfit.simulate import Timeline, simulate
from trainfit.trace import Trace

_LEAST_SHARE = 0.0005
"""A region that could not free this share of the peak is not worth looking at."""
_MOST_REGIONS = 1200
_MOST_GROUPS = 600
_MOST_POINTS = 14
_POINTS_BETWEEN = 24
"""For all regions that are alike together: many of them fill the gaps of their hull by differing."""
_MOST_GROUPS_BETWEEN = 120
"""Larger regions have many points on their hull."""
_MOST_ROUNDS = 8
_FINE_GAP_SHARE, _COARSE_GAP_SHARE = 1e-4, 2e-3
"""Of the step's time: what is less is not worth looking for, and what is good enough after a while."""
_FEW_OPTIONS = 400
"""So few are solved to the end, if that is quick."""
_FINE_SECONDS = 2.0
"""How long to look for the last bit."""
Progress = Callable[[str], None]
Passes = tuple[RegionGraph, ...]
"""The same call of a module, once for each pass over the model."""


@dataclass(frozen=True)
class Infeasible:
    """No plan fits; the smallest peak that was reached, and the plan that reaches it."""

    budget_bytes: int
    smallest: Plan


@dataclass
class Planner:
    """Everything about one trace that does not depend on the budget: curves, effects, the master problem."""

    trace: Trace
    costs: CostTable
    regions: list[Passes] = field(default_factory=list)
    problem: MasterProblem = field(init=False)
    baseline_peak_bytes: int = field(init=False)
    baseline_seconds: float = field(init=False)
    step: Unplanned = field(init=False)
    warnings: tuple[str, ...] = ()
    _timelines: dict[Plan, Timeline] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find the regions and their curves."""
        timeline = simulate(self.trace)
        step = schedule(self.trace, self.costs)
        self.baseline_peak_bytes = timeline.peak_bytes
        self.baseline_seconds = step.step_seconds
        self.step = certify.unplanned(self.trace, self.costs, timeline, step.step_seconds)
        self.regions = _regions(self.trace, step.marginal_seconds.tolist(), self.baseline_peak_bytes)
        options = _options(step, self.regions)
        exclusive = _exclusive(self.regions, options)
        self.problem = master.build(timeline, options, exclusive, _spare_seconds(step))

    def plan(self, budget_bytes: int, *, seconds_limit: float = 30.0) -> Plan | Infeasible:
        """Return the fastest certified plan within the budget, or the one with the smallest peak."""
        nothing = self.nothing(budget_bytes)
        if nothing.peak_bytes <= budget_bytes:
            return nothing
        deadline = time.monotonic() + seconds_limit
        modelled, bound, best = certify.peak_within(self.trace, budget_bytes), 0.0, None
        for number in range(_MOST_ROUNDS):
            found = self._solved(modelled, max(deadline - time.monotonic(), 1.0))
            if number == 0:
                # Only the first is asked for the whole budget, so that its bound holds.
                bound = found.bound
            if not found.feasible:
                break
            plan = self.certified(found.options, budget_bytes, bound)
            if plan.peak_bytes <= budget_bytes:
                best = plan
                break
            # The replay is the truth: ask the model for as much less as it was wrong by.
            modelled -= plan.peak_bytes - budget_bytes
        if best is not None:
            return best
        smallest = self.smallest(budget_bytes, seconds_limit=max(deadline - time.monotonic(), 2.0))
        if smallest.peak_bytes > budget_bytes:
            # The solver may have run out of time before it found anything; whole blocks need none.
            smallest = min(smallest, self._whole_blocks(budget_bytes), key=lambda plan: plan.peak_bytes)
        return smallest if smallest.peak_bytes <= budget_bytes else Infeasible(budget_bytes, smallest)

    def nothing(self, budget_bytes: int = 0) -> Plan:
        """Return the plan without a region."""
        return self.certified([], budget_bytes, 0.0)

    def _solved(self, budget_bytes: int, seconds_limit: float) -> Solution:
        """Solve the master problem: finely if that is quick, else at least well."""
        coarse, fine = _COARSE_GAP_SHARE * self.baseline_seconds, _FINE_GAP_SHARE * self.baseline_seconds
        if len(self.problem.options) <= _FEW_OPTIONS:
            fine = 0.0
        fine_seconds = min(_FINE_SECONDS, seconds_limit)
        found = self.problem.solve(budget_bytes, seconds_limit=fine_seconds, gap_seconds=fine)
        close = found.feasible and found.seconds - found.bound <= coarse
        if close or found.optimal or seconds_limit <= fine_seconds:
            return found
        return self.problem.solve(
            budget_bytes, seconds_limit=seconds_limit - fine_seconds, gap_seconds=coarse
        )

    def smallest(self, budget_bytes: int = 0, *, seconds_limit: float = 10.0) -> Plan:
        """Return the plan with the smallest peak that was found."""
        found = self.problem.smallest_peak(seconds_limit=seconds_limit)
        return self.certified(found.options, budget_bytes, 0.0)

    def frontier(self, points: int, *, seconds_limit: float = 60.0) -> list[Plan]:
        """Return plans from the smallest reachable peak to none at all, none of them beaten by another.

        The curves and the master problem are those of one plan; only the budget changes.
        """
        deadline = time.monotonic() + seconds_limit
        smallest = self.smallest()
        nothing = self.nothing(self.baseline_peak_bytes)
        found = [smallest, nothing]
        span = nothing.peak_bytes - smallest.peak_bytes
        for number in range(1, points):
            budget = smallest.peak_bytes + span * number // points
            left = deadline - time.monotonic()
            if left <= 0:
                break
            plan = self.plan(budget, seconds_limit=max(left / (points - number), 1.0))
            if isinstance(plan, Plan):
                found.append(plan)
        tightest = self.plan(smallest.peak_bytes, seconds_limit=5.0)
        if isinstance(tightest, Plan):
            found.append(tightest)
        return _not_beaten(found)

    def _whole_blocks(self, budget_bytes: int) -> Plan:
        """Return the plan that computes every block again."""
        seconds = schedule(self.trace, self.costs).marginal_seconds.tolist()
        blocks = [effect_of(self.trace, b, everything_again(b)) for b in blocks_of(self.trace, seconds)]
        return self._certified(blocks, budget_bytes, 0.0, None)

    def timeline_of(self, plan: Plan) -> Timeline:
        """Return the memory of the step with a plan that this planner made."""
        return self._timelines[plan]

    def certified(self, chosen: Sequence[int], budget_bytes: int, bound: float) -> Plan:
        """Replay the chosen options on the trace, and promise what comes out."""
        effects = [effect for number in chosen for effect in self.problem.options[number].effects]
        return self._certified(effects, budget_bytes, bound, self.problem.seconds_of(chosen))

    def _certified(
        self, effects: Sequence[Effect], budget_bytes: int, bound: float, summed_seconds: float | None
    ) -> Plan:
        plan, timeline = certify.certified(
            self.step,
            effects,
            budget_bytes=budget_bytes,
            bound_seconds=bound,
            summed_seconds=summed_seconds,
            method="regions",
        )
        self._timelines[plan] = timeline
        return plan


def _not_beaten(plans: list[Plan]) -> list[Plan]:
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.peak_bytes, plan.step_seconds)):
        if not kept or plan.step_seconds < kept[-1].step_seconds:
            kept.append(plan)
    return kept


def _regions(trace: Trace, seconds: list[float], peak_bytes: int) -> list[Passes]:
    """Return the module calls worth checkpointing, each stretch of ops once, the outermost of equals."""
    places = calls_in_pass(trace)
    members: dict[tuple[int, int, int], list[RegionGraph]] = {}
    seen: set[tuple[int, int]] = set()
    for calls in (*((number,) for number in candidate_calls(trace)), *_rows(trace)):
        first, last = trace.calls[calls[0]], trace.calls[calls[-1]]
        if (first.forward_start, last.forward_end) in seen:
            continue
        region = chain_graph(trace, calls, seconds)
        if region is None or len(region.groups) > _MOST_GROUPS or _freed(region) < _LEAST_SHARE * peak_bytes:
            continue
        seen.add((region.start, region.end))
        members.setdefault((first.module, places[calls[0]], len(calls)), []).append(region)
    found = [tuple(passes) for passes in members.values() if _alike(trace, passes)]
    largest = sorted(found, key=lambda passes: -_freed(passes[0]))
    return sorted(largest[:_MOST_REGIONS], key=lambda passes: (passes[0].start, -passes[0].end))


def _rows(trace: Trace) -> Iterator[tuple[int, ...]]:
    """Yield blocks that follow each other, by two, four, eight: so they lie within each other or apart."""
    for calls in block_families(trace):
        length = 2
        while 2 * length <= len(calls):
            for first in range(0, len(calls) - length + 1, length):
                yield tuple(calls[first : first + length])
            length *= 2


def _freed(region: RegionGraph) -> int:
    return sum(group.bytes for group in region.groups if group.needed)


def _alike(trace: Trace, passes: list[RegionGraph]) -> bool:
    """Whether one choice can be made for all passes: they do the same ops, on whatever sizes."""
    if len(passes) == 1:
        return True
    shapes = {
        tuple((g.saved, g.keepable, g.repeatable, g.reads, len(g.ops)) for g in region.groups)
        + tuple(trace.op_name(op) for op in region.ops)
        for region in passes
    }
    return len(shapes) == 1


def _spare_seconds(step: Schedule) -> float:
    """Return what the host may do more; where it runs the kernels too, all that it does is in the options."""
    return math.inf if step.costs.host.runs_kernels else step.spare_seconds


def _option(step: Schedule, occupied: Seconds, number: int, effects: tuple[Effect, ...]) -> Option:
    seconds = sum(effect.choice.seconds for effect in effects)
    executor = sum(executor_seconds(effect, step.costs.host) for effect in effects)
    if step.costs.host.runs_kernels:
        return Option(number, effects, seconds + executor)
    again = sum(float(occupied[list(effect.segment)].sum()) for effect in effects)
    return Option(number, effects, seconds, again + executor)


def _options(step: Schedule, regions: list[Passes]) -> list[Option]:
    keys = [
        tuple((g.sizes, g.seconds, g.saved, g.keepable, g.repeatable, g.reads) for g in passes[0].groups)
        for passes in regions
    ]
    alike, occupied = Counter(keys), step.occupied_seconds
    curves: dict[object, list[Choice]] = {}
    options: list[Option] = []
    for number, (passes, key) in enumerate(zip(regions, keys)):
        if key not in curves:
            hull = _thinned(curve_of(passes[0].groups))
            between = _POINTS_BETWEEN // alike[key] if len(passes[0].groups) <= _MOST_GROUPS_BETWEEN else 0
            curves[key] = with_points_between(passes[0].groups, hull, between)
        points = curves[key]
        whole = everything_again(passes[0])
        if all(can_be_whole(step.trace, region) for region in passes) and not any(
            point.repeated == whole.repeated for point in points
        ):
            points = [*points, whole]
        for choice in points:
            chosen = [choice, *(choice_of(region.groups, choice.repeated) for region in passes[1:])]
            effects = tuple(effect_of(step.trace, *each) for each in zip(passes, chosen))
            options.append(_option(step, occupied, number, effects))
    return options


def _thinned(points: list[Choice]) -> list[Choice]:
    """Keep about evenly many bytes between the points; always both ends."""
    if len(points) <= _MOST_POINTS:
        return points
    step = (len(points) - 1) / (_MOST_POINTS - 1)
    return [points[round(number * step)] for number in range(_MOST_POINTS)]


def _exclusive(passes: list[Passes], options: list[Option]) -> list[list[int]]:
    """Return the options of every chain of nested regions: at most one of them may be chosen.

    A chain for every region that has none inside: it and all regions around it.
    """
    regions = [region for region, *_ in passes]
    of_region: dict[int, list[int]] = {}
    for number, option in enumerate(options):
        of_region.setdefault(option.region, []).append(number)
    chains: list[list[int]] = []
    around: list[int] = []
    innermost = True
    for number, region in enumerate(regions):
        while around and regions[around[-1]].end <= region.start:
            if innermost:
                chains.append(list(around))
            innermost = False
            around.pop()
        around.append(number)
        innermost = True
    if around:
        chains.append(around)
    return [[option for region in chain for option in of_region.get(region, [])] for chain in chains]
