"""Find the fastest plan under a budget: curves of the regions, a choice among them, and its certificate."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.device_memory import StepMemory
from trainfit.allocator.named_options import DEFAULT_OPTIONS
from trainfit.basics.doing import in_turn
from trainfit.basics.units import format_seconds
from trainfit.costs.table import CostTable
from trainfit.planning import certify, master
from trainfit.planning.baselines import UsualWay, UsualWays, blocks_of
from trainfit.planning.budget_search import FINE_GAP_SHARE, BudgetSearch
from trainfit.planning.certify import Certified, Unplanned
from trainfit.planning.effects import effect_of
from trainfit.planning.full_recompute import full_recompute
from trainfit.planning.host_copies import HostLink
from trainfit.planning.known_options import KnownOptions
from trainfit.planning.master import MasterProblem, Solution
from trainfit.planning.planned_columns import PlannedColumns
from trainfit.planning.uniform_choices import UniformChoices
from trainfit.plans.plan import Plan
from trainfit.traces.trace import Trace

_MOST_ROUNDS = 8
_COARSE_GAP_SHARE = 2e-3
"""Of the step's time: what is good enough after a while."""
_MOST_TRIALS = 80
"""How many choices are given to the allocator for one budget."""
_CLEARLY_SHARE = 0.01
"""Of the step: a plan that is faster by this much is worth a setting of the allocator."""
_FEW_OPTIONS = 400
"""So few are solved to the end, if that is quick."""
_FINE_SECONDS = 2.0
"""How long to look for the last bit."""


@dataclass
class Planner:
    """Everything about one trace that does not depend on the budget: curves, effects, the master problem."""

    trace: Trace
    costs: CostTable
    allocator: AllocatorOptions | None = DEFAULT_OPTIONS
    link: HostLink | None = None
    """Over which results may be copied to the host's memory, instead of being kept or recomputed."""
    fine_gap_share: float = FINE_GAP_SHARE
    """Of the step's time: what is less is not worth looking for."""
    known: KnownOptions = field(default_factory=KnownOptions)
    """Of steps like this one that were planned before."""
    problem: MasterProblem = field(init=False)
    step: Unplanned = field(init=False)
    trials: BudgetSearch | None = field(init=False, default=None)
    """Where an allocator hands memory out: the search among plans that it runs."""
    usual: UsualWays = field(init=False)
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Find the regions and their curves."""
        self.step = Unplanned.of(self.trace, self.costs, self.allocator)
        self.usual = UsualWays(self.step)
        timeline, times = self.step.replay.timeline, self.step.replay.times
        options, exclusive = self.known.options(times, timeline.peak_bytes, self.link)
        # Where the host runs the kernels too, all that it does is in the options.
        spare_seconds = math.inf if self.costs.host.runs_kernels else times.spare_seconds
        self.problem = master.build(timeline, options, exclusive, spare_seconds)
        if StepMemory(timeline, self.costs.device, self.allocator).is_simulated:
            choices = UniformChoices(self.problem, timeline, times)
            columns = PlannedColumns(self.trace, self.costs.device)
            self.trials = BudgetSearch(
                self.problem, self.step, choices, columns, _MOST_TRIALS, fine_gap_share=self.fine_gap_share
            )

    def with_allocator(self, allocator: AllocatorOptions | None) -> Planner:
        """Return the planner of the same step with another setting of the allocator.

        The curves, the problem and the solver's answers are the same: only what runs is another question.
        """
        other = copy.copy(self)
        other.allocator, other.step = allocator, replace(self.step, allocator=allocator)
        other.usual = UsualWays(other.step)
        if self.trials is not None:
            other.trials = self.trials.with_allocator(allocator)
        return other

    def plan(self, budget_bytes: int, *, seconds_limit: float = 30.0) -> Certified:
        """Return the fastest plan within the budget, or the one with the smallest peak if none fits."""
        nothing = self.nothing(budget_bytes)
        if nothing.fits:
            return nothing
        deadline = time.monotonic() + seconds_limit
        if self.trials is not None:
            found = self.trials.search(budget_bytes, deadline, self._solved)
        else:
            found = self._search(budget_bytes, deadline)
        found = self._copies_wait_less(found, budget_bytes, deadline)
        # Searches end before they have seen everything: what people do anyway is a plan, too.
        found = self._no_usual_way_is_faster(found, budget_bytes)
        if found is not None:
            return found
        smallest = self.smallest(budget_bytes, seconds_limit=max(deadline - time.monotonic(), 2.0))
        if smallest.fits:
            return smallest
        # The solver may have run out of time before it found anything; full recomputation needs none.
        return min(smallest, self._all_blocks(budget_bytes), key=lambda plan: plan.memory_bytes)

    def _copies_wait_less(
        self, found: Certified | None, budget_bytes: int, deadline: float
    ) -> Certified | None:
        """Return a plan or, if its copies wait for each other, a faster one whose copies do not.

        Copies that share the link run one after the other: the last of them may be too late.
        """
        clearly = _COARSE_GAP_SHARE * self.step.step_seconds
        if found is None or not self.problem.link_rows:
            return found
        if found.step_seconds - found.plan.bound_seconds < clearly:
            return found
        alone = self.problem.solve(
            found.timeline.peak_bytes,
            seconds_limit=max(deadline - time.monotonic(), 1.0),
            gap_seconds=clearly,
            link_is_shared=False,
        )
        if not alone.feasible or self.step.step_seconds + alone.seconds >= found.step_seconds:
            return found
        other = self.certified(alone.options, budget_bytes, found.plan.bound_seconds)
        return other if other.fits and other.step_seconds < found.step_seconds else found

    def _no_usual_way_is_faster(self, found: Certified | None, budget_bytes: int) -> Certified | None:
        """Return a plan or, if one of the usual ways is faster within the budget, that one as a plan."""
        if found is not None and self.trials is not None and self.trials.is_close(found):
            return found
        for way in sorted(self.usual.within(budget_bytes), key=lambda way: way.baseline.step_seconds):
            if not way.beats(found.plan if found else None, budget_bytes):
                continue
            plan = self._usual_plan(way, budget_bytes, found.plan.bound_seconds if found else 0.0)
            if plan is not None and plan.fits:
                return plan
        return found

    def _usual_plan(self, way: UsualWay, budget_bytes: int, bound_seconds: float = 0.0) -> Certified | None:
        """Return one of the usual ways as a plan, if it is one."""
        if way.baseline.differs is not None:
            return None
        plan = certify.certified(self.step, way.effects, budget_bytes, 0.0, method="regions")
        bound = max(min(bound_seconds, plan.step_seconds), plan.plan.bound_seconds)
        return replace(plan, plan=replace(plan.plan, bound_seconds=bound))

    def expandable(self, found: Certified, *, seconds_limit: float = 10.0) -> Plan | None:
        """Return the plan for the same budget with expandable segments, if it is clearly faster or the first.

        They are a setting of the allocator, which then cuts memory up less.
        """
        options = self.allocator
        if self.trials is None or options is None or options.expandable_segments:
            return None
        least_gain = _CLEARLY_SHARE * self.step.step_seconds
        if found.fits and found.step_seconds - found.plan.bound_seconds < least_gain:
            return None
        budget_bytes, deadline = found.plan.budget_bytes, time.monotonic() + seconds_limit
        search = self.trials.rough(replace(options, expandable_segments=True))
        better: Certified | None = search.certified(search.choices.combination(()), budget_bytes, 0.0)
        if better is None or not better.fits:
            better = search.search(budget_bytes, deadline, search.first)
        if better is None or (found.fits and found.step_seconds - better.step_seconds < least_gain):
            return None
        return better.plan

    def _search(self, budget_bytes: int, deadline: float) -> Certified | None:
        """Return the fastest plan whose replay is within the budget: memory is taken as it is asked for.

        The replay is the truth: the model is asked for as much less as it was wrong by.
        """
        modelled, bound = certify.peak_within(self.trace, budget_bytes), 0.0
        for number in range(_MOST_ROUNDS):
            found = self._solved(modelled, max(deadline - time.monotonic(), 1.0))
            if number == 0:
                # Only the first is asked for the whole budget, so that its bound holds.
                bound = found.bound
            if not found.feasible:
                return None
            plan = self.certified(found.options, budget_bytes, bound)
            if plan.fits:
                return plan
            modelled -= max(plan.memory_bytes - budget_bytes, 1)
        return None

    def nothing(self, budget_bytes: int = 0) -> Certified:
        """Return the plan without a region."""
        return self.certified([], budget_bytes, 0.0)

    def _solved(self, budget_bytes: int, seconds_limit: float) -> Solution:
        """Solve the master problem: finely if that is quick, else at least well."""
        coarse, fine = (share * self.step.step_seconds for share in (_COARSE_GAP_SHARE, self.fine_gap_share))
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

    def smallest(self, budget_bytes: int = 0, *, seconds_limit: float = 10.0) -> Certified:
        """Return the plan that runs in the least memory of those that were found."""
        found = self.problem.smallest_peak(seconds_limit=seconds_limit)
        if self.trials is not None:
            return self.trials.least(found, budget_bytes)
        return self.certified(found.options, budget_bytes, 0.0)

    def frontier(self, points: int, *, seconds_limit: float = 60.0) -> list[Plan]:
        """Return plans from the smallest reachable peak to none at all, none of them beaten by another.

        The curves and the master problem are those of one plan; only the budget changes. Budgets that are
        far apart come first: if time runs out, those between are missing, and a warning says so.
        """
        deadline = time.monotonic() + seconds_limit
        smallest = self.smallest()
        nothing = self.nothing(self.step.peak_bytes)
        found = [smallest.promised(), nothing.promised()]
        span = nothing.memory_bytes - smallest.memory_bytes
        # Halves, then quarters, and so on: by the largest power of two that divides the number.
        numbers = sorted(range(1, points), key=lambda number: -(number & -number))
        for done, number in enumerate(in_turn("solving for budget", numbers)):
            budget = smallest.memory_bytes + span * number // points
            left = deadline - time.monotonic()
            if left <= 0:
                self.warnings += (
                    f"the search ended after {format_seconds(seconds_limit)}, with {done} of {points - 1} "
                    "budgets: between two plans there may be others. A single plan has its own time.",
                )
                break
            planned = self.plan(budget, seconds_limit=max(left / (points - 1 - done), 1.0))
            found += [planned.promised()] if planned.fits else []
        tightest = self.plan(smallest.memory_bytes, seconds_limit=5.0)
        found += [tightest.promised()] if tightest.fits else []
        return _not_beaten([*found, *self._usual_plans()])

    def _usual_plans(self) -> list[Plan]:
        """Return those of the usual ways that are plans: they may lie between the budgets solved for."""
        ways = self.usual.within(self.costs.device.default_budget_bytes)
        plans = [self._usual_plan(way, way.baseline.memory_bytes) for way in ways if way.effects]
        return [plan.promised() for plan in plans if plan is not None]

    def _all_blocks(self, budget_bytes: int) -> Certified:
        """Return the plan that computes every block again."""
        seconds = self.step.replay.times.marginal_seconds.tolist()
        effects = [effect_of(self.trace, b, full_recompute(b)) for b in blocks_of(self.trace, seconds)]
        return certify.certified(self.step, effects, budget_bytes, 0.0, method="regions")

    def certified(self, chosen: Sequence[int], budget_bytes: int, bound: float) -> Certified:
        """Replay the chosen options on the trace, and promise what comes out."""
        effects = [effect for number in chosen for effect in self.problem.options[number].effects]
        summed = self.problem.seconds_of(chosen)
        return certify.certified(
            self.step, effects, budget_bytes, bound, summed_seconds=summed, method="regions"
        )


def _not_beaten(plans: list[Plan]) -> list[Plan]:
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.memory_bytes, plan.step_seconds)):
        if not kept or plan.step_seconds < kept[-1].step_seconds:
            kept.append(plan)
    return kept
