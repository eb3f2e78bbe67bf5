"""One plan for all processes that train together.

Each captures its own step. The one that lacks most memory makes the plan; the others replay it over their own
traces, which may be of other sizes, and see whether they fit as well. If one does not, it makes the next.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.device_memory import StepMemory
from trainfit.api.choose import plan_step, refuse_infeasible
from trainfit.api.request import Request
from trainfit.autoplanning.autoplan_result import RankNeed
from trainfit.autoplanning.rank_answers import Ranks
from trainfit.basics.units import format_bytes
from trainfit.devices.device_table import Device
from trainfit.devices.distinct_ranks import pipeline_ranks
from trainfit.errors import BudgetTooSmall, PlanError
from trainfit.planning.plan_replay import replay_plan
from trainfit.plans.plan import Plan
from trainfit.plans.plan_store import plan_as_data, plan_of_data
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

_SECONDS_LIMIT = 10.0
"""Training waits meanwhile."""
_MOST_PLANS = 4
"""How many processes make one before it is said that none of theirs is good for all."""


@dataclass(frozen=True)
class OwnStep:
    """The step of this process: what it needs, and what there is for it."""

    trace: Trace
    device: Device
    budget_bytes: int
    allocator: AllocatorOptions | None

    def need(self, rank: int) -> RankNeed:
        """Return what it needs as it is."""
        memory = StepMemory(simulate(self.trace), self.device, self.allocator)
        fits = memory.runs_within(self.budget_bytes) and memory.smallest_bytes <= self.budget_bytes
        return RankNeed(rank, memory.smallest_bytes, self.budget_bytes, fits)

    def planned(self) -> tuple[Plan, tuple[str, ...]]:
        """Return the fastest plan with which it fits, and what is to be said about it."""
        request = Request(self.trace, self.device, allocator=self.allocator)
        result = plan_step(request, self.budget_bytes, _SECONDS_LIMIT)
        refuse_infeasible(result)
        return result.plan, result.warnings

    def need_with(self, plan: Plan, need: RankNeed) -> RankNeed:
        """Return what it needs with a plan, of which another process may have made it."""
        cluster = self.trace.cluster
        if plan.cluster == cluster:
            return replace(need, planned_bytes=plan.memory_bytes, fits=True)
        timeline, peak_bytes = replay_plan(plan, self.trace)
        memory = StepMemory(timeline, self.device, self.allocator)
        planned = max(peak_bytes, memory.smallest_bytes)
        return replace(need, planned_bytes=planned, fits=planned <= self.budget_bytes)


@dataclass(frozen=True)
class Agreed:
    """What all processes found together: the plan, if one is needed, and what each has with it."""

    plan: Plan | None
    needs: tuple[RankNeed, ...]
    warnings: tuple[str, ...] = ()


def agree(own: OwnStep, ranks: Ranks) -> Agreed:
    """Return the plan that all processes run; called by all of them at once."""
    needs = _asked(ranks, lambda: _checked(own, ranks))
    if all(need.fits for need in needs):
        return Agreed(None, needs)
    tried: list[int] = []
    worst = _worst(needs)
    found = needs
    while worst not in tried and len(tried) < _MOST_PLANS:
        tried.append(worst)
        plan, warnings = _plan_of(worst, own, ranks)
        found = _asked(ranks, lambda plan=plan: own.need_with(plan, needs[ranks.rank]))
        if all(need.fits for need in found):
            return Agreed(plan, found, warnings)
        worst = _worst(found)
    last = found[worst]
    raise BudgetTooSmall(
        f"no plan of {len(tried)} that were tried fits on all {ranks.count} ranks: with the last, rank "
        f"{worst} needs {format_bytes(last.planned_bytes)} of {format_bytes(last.budget_bytes)}. Leave more "
        "for it (budget=, reserve=), or divide the batch more evenly.",
        last.planned_bytes,
    )


def _checked(own: OwnStep, ranks: Ranks) -> RankNeed:
    if ranks.count > 1 and pipeline_ranks(own.trace):
        raise PlanError(
            "the step sends results from rank to rank, as the stages of a pipeline do, and these have models "
            "of their own: one plan is not good for all. Make plans beforehand, with trainfit plan --rank N, "
            "and apply each to its stage."
        )
    return own.need(ranks.rank)


def _asked(ranks: Ranks, answer: Any) -> tuple[RankNeed, ...]:
    return tuple(RankNeed(**one) for one in ranks.each(lambda: asdict(answer())))


def _plan_of(rank: int, own: OwnStep, ranks: Ranks) -> tuple[Plan, tuple[str, ...]]:
    """Let one process make a plan, and give it to all."""
    if ranks.count == 1:
        return own.planned()

    def answer() -> Any:
        if ranks.rank != rank:
            return None
        plan, warnings = own.planned()
        return {"plan": plan_as_data(plan), "warnings": warnings}

    found = ranks.each(answer)[rank]
    return plan_of_data(found["plan"]), tuple(found["warnings"])


def _worst(needs: tuple[RankNeed, ...]) -> int:
    """Return the rank that lacks most."""
    return max(needs, key=lambda need: (need.lacking_bytes, -need.rank)).rank
