"""A plan that was made for one optimizer, taken for another: it does there what planning anew would do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainfit.allocator.named_options import DEFAULT_OPTIONS
from trainfit.api.request import Request
from trainfit.fitting.lent_plans import LentPlans
from trainfit.models.recipe import StepOptions
from trainfit.planning.certify import Unplanned
from trainfit.planning.host_copies import HostLink
from trainfit.planning.planner import Planner

_EXPANDABLE = replace(DEFAULT_OPTIONS, expandable_segments=True)


def step_of(optimizer: str, batch: int = 64) -> Unplanned:
    request = Request("gpt2-tiny", "h100", StepOptions(batch=batch, seq=128, optimizer=optimizer), None)
    trace = request.trace()
    return Unplanned.of(trace, request.price(trace), _EXPANDABLE)


@pytest.fixture(scope="module")
def steps() -> dict[str, Unplanned]:
    return {name: step_of(name) for name in ("adamw", "adamw-fused")}


def planner_of(step: Unplanned) -> Planner:
    return Planner(step.trace, step.costs, _EXPANDABLE, HostLink.of(step.costs.device))


def test_a_borrowed_plan_does_what_planning_anew_does(steps: dict[str, Unplanned]) -> None:
    foreach, fused = steps["adamw"], steps["adamw-fused"]
    # The optimizer's own temporaries are not what a plan is made for.
    budget = int(0.85 * foreach.peak_bytes)
    made = planner_of(foreach).plan(budget)
    assert made.fits and made.plan.regions
    plans = LentPlans()
    plans.remember(made)
    assert fused.peak_bytes - budget >= 0.98 * (foreach.peak_bytes - budget), "the steps are comparable"
    borrowed = plans.borrowed(fused, budget, HostLink.of(fused.costs.device))
    assert borrowed is not None and borrowed.fits
    own = planner_of(fused).plan(budget)
    assert borrowed.step_seconds <= own.step_seconds + 0.02 * made.plan.added_seconds
    assert borrowed.plan.trace_hash == own.plan.trace_hash != made.plan.trace_hash
    assert borrowed.plan.regions == made.plan.regions


def test_with_less_to_free_nothing_is_borrowed(steps: dict[str, Unplanned]) -> None:
    foreach = steps["adamw"]
    budget = int(0.8 * foreach.peak_bytes)
    made = planner_of(foreach).plan(budget)
    plans = LentPlans()
    plans.remember(made)
    link = HostLink.of(foreach.costs.device)
    assert plans.least_added_seconds(foreach.peak_bytes - budget) == made.plan.added_seconds
    assert plans.borrowed(foreach, int(0.9 * foreach.peak_bytes), link) is None
    assert plans.least_added_seconds(foreach.peak_bytes // 10) == 0.0


def test_another_model_borrows_nothing(steps: dict[str, Unplanned]) -> None:
    foreach = steps["adamw"]
    plans = LentPlans()
    plans.remember(planner_of(foreach).plan(int(0.85 * foreach.peak_bytes)))
    request = Request("bert-tiny", "h100", StepOptions(batch=64), None)
    trace = request.trace()
    other = Unplanned.of(trace, request.price(trace), _EXPANDABLE)
    assert plans.borrowed(other, int(0.5 * other.peak_bytes), HostLink.of(other.costs.device)) is None
