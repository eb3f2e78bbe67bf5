"""With a plan the model computes bitwise what it computes without, whatever the plan decides."""

from __future__ import annotations

import dataclasses
import random
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planned_models import SUBJECTS, assert_same_with
from plans import as_a_whole, plan_for, recompute_everything, save_everything, save_products

from trainfit.plans.decisions import Decision
from trainfit.plans.plan import Plan, RegionKind
from trainfit.traces.trace import Trace


@cache
def trace_of(name: str) -> Trace:
    return SUBJECTS[name].trace()


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("policy", [recompute_everything, as_a_whole, save_everything, save_products])
def test_loss_gradients_and_buffers_are_the_same(name: str, policy: object) -> None:
    subject = SUBJECTS[name]
    assert_same_with(subject, plan_for(trace_of(name), subject.regions, policy), steps=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_whole_model_can_be_one_region(name: str) -> None:
    trace = trace_of(name)
    assert_same_with(SUBJECTS[name], plan_for(trace, [trace.modules[0].name], save_products))


@pytest.mark.parametrize("name", SUBJECTS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), share=st.floats(0, 1))
def test_any_choice_of_what_is_saved_gives_the_same(name: str, seed: int, share: float) -> None:
    chance = random.Random(seed)
    subject = SUBJECTS[name]
    assert_same_with(subject, plan_for(trace_of(name), subject.regions, lambda *_: chance.random() < share))


@pytest.mark.parametrize("name", SUBJECTS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1))
def test_even_a_plan_without_sense_gives_the_same(name: str, seed: int) -> None:
    subject = SUBJECTS[name]
    plan = plan_for(trace_of(name), subject.regions, recompute_everything)
    assert_same_with(subject, with_random_decisions(plan, random.Random(seed)))


def with_random_decisions(plan: Plan, chance: random.Random) -> Plan:
    kinds = tuple(
        RegionKind(tuple(dataclasses.replace(op, decision=chance.choice(list(Decision))) for op in kind.ops))
        for kind in plan.kinds
    )
    return dataclasses.replace(plan, kinds=kinds)
