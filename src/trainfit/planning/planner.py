"""Find the fastest plan under a budget: curves of the regions, a choice among them, and its certificate."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainfit.costs.schedule import schedule
from trainfit.costs.table import CostTable
from trainfit.planning import certify, master
from trainfit.planning.baselines import blocks_of
from trainfit.planning.certify import Unplanned
from trainfit.planning.effects import Effect, effect_of
from trainfit.planning.full_recompute import full_recompute
from trainfit.planning.master import MasterProblem, Solution
from trainfit.planning.options import options_of
from trainfit.plans import Plan
from trainfit.simulate import Timeline, simulate
from trainfit.trace import Trace

_MOST_ROUNDS = 8
_FINE_GAP_SHARE, _COARSE_GAP_SHARE = 1e-4, 2e-3
"""Of the step's time: what is less is not worth looking for, and what is good enough after a while."""
_FEW_OPTIONS = 400
"""So few are solved to the end, if that is quick."""
_FINE_SECONDS = 2.0
"""How long to look for the last bit."""


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
        options, exclusive = options_of(step, self.baseline_peak_bytes)
        # Where the host runs the kernels too, all that it does is in the options.
        spare_seconds = math.inf if self.costs.host.runs_kernels else step.spare_seconds
        self.problem = master.build(timeline, options, exclusive, spare_seconds)

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
        blocks = [effect_of(self.trace, b, full_recompute(b)) for b in blocks_of(self.trace, seconds)]
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
