"""Plans that were made for one combination of changes, tried on others whose modules run the same operators.

An optimizer or a setting of the allocator leaves forward and backward as they are, so that the plan that is
best for one is nearly always best for the other; replaying it takes far less time than planning anew. It
is taken if the other has as much to free, and if the plan adds no more than any plan did for as much.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trainfit.errors import PlanDoesNotFit
from trainfit.planning import certify
from trainfit.planning.certify import Certified, Unplanned
from trainfit.planning.host_copies import HostLink
from trainfit.planning.plan_replay import effects_of_plan
from trainfit.plans.plan import Plan

_AS_MUCH = 0.98
"""Of the bytes that a plan was made to free: with less to free there may be a faster one."""
_NO_MORE = 1.02
"""Times what the best plan adds that frees as much."""


@dataclass(frozen=True)
class _MadePlan:
    plan: Plan
    missing_bytes: int
    """By how much the step without the plan is above the budget, in bytes that are asked for."""


@dataclass
class LentPlans:
    """The plans that were made for steps like each other."""

    _made: list[_MadePlan] = field(default_factory=list)

    def remember(self, made: Certified) -> None:
        """Keep a plan that fits, to be tried on other steps."""
        if made.plan.regions:
            self._made.append(_MadePlan(made.plan, _missing_bytes(made.plan)))

    def least_added_seconds(self, missing_bytes: int) -> float:
        """Return what the best plan adds that was made to free as much, or a little more; 0 if none was."""
        comparable = (one.plan.added_seconds for one in self._made_for(missing_bytes))
        return min(comparable, default=0.0)

    def _made_for(self, missing_bytes: int) -> list[_MadePlan]:
        return [one for one in self._made if _AS_MUCH * one.missing_bytes <= missing_bytes]

    def borrowed(self, step: Unplanned, budget_bytes: int, link: HostLink | None) -> Certified | None:
        """Return the first plan that does for this step what it does for its own; None if none does."""
        missing = step.peak_bytes - budget_bytes
        least = self.least_added_seconds(missing)
        for one in sorted(self._made_for(missing), key=lambda one: one.plan.added_seconds):
            if one.plan.added_seconds > _NO_MORE * least:
                break
            try:
                effects = effects_of_plan(
                    one.plan, step.trace, step.replay.times.marginal_seconds.tolist(), link
                )
            except PlanDoesNotFit:
                continue
            found = certify.certified(step, effects, budget_bytes, 0.0, method=one.plan.method)
            if found.plan.added_seconds <= _NO_MORE * least and found.fits:
                return found
        return None


def _missing_bytes(plan: Plan) -> int:
    return plan.baseline_peak_bytes - plan.budget_bytes
