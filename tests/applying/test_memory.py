"""A plan lowers the memory that a step really needs, and a capture of the planned model predicts it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache

import pytest
import torch
from planned_models import ConvNet, InPlaceMLP, Subject, Transformer
from plans import Policy, plan_for, recompute_everything, save_everything, save_products

from trainfit.applying import applied, apply
from trainfit.capturing import capture
from trainfit.plans.plan import Plan
from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace
from trainfit.verifying.measuring import measure_step
from trainfit.workspace.measured import THOROUGH
from trainfit.workspace.profiler import no_cycle_collection, profile_allocations

SUBJECTS = {
    "transformer": Subject(
        lambda: Transformer(blocks=4, width=32),
        lambda: torch.randint(0, 20, (4, 24)),
        tuple(f"Transformer.blocks.{n}" for n in range(4)),
    ),
    "in place": Subject(
        InPlaceMLP, lambda: torch.randn(300, 12), ("InPlaceMLP.parts.0", "InPlaceMLP.parts.1")
    ),
    "convolutions": Subject(
        ConvNet, lambda: torch.randn(4, 3, 16, 16), ("ConvNet.parts.0", "ConvNet.parts.1")
    ),
}
RANDOM_STATE_BYTES = 5056


@cache
def trace_of(name: str) -> Trace:
    return capture(SUBJECTS[name].build, limits=THOROUGH)


@cache
def error_without_plan(name: str) -> int:
    return simulate(trace_of(name)).peak_bytes - measure_step(SUBJECTS[name].build, "cpu").peak_bytes


def planned(subject: Subject, plan: Plan) -> Callable[[], Step]:
    def build() -> Step:
        step = subject.build()
        apply(step.model, plan)
        return step

    return build


def peaks(name: str, policy: Policy) -> tuple[int, int]:
    """Return the peak of a captured step with a plan, and of a real one."""
    subject = SUBJECTS[name]
    build = planned(subject, plan_for(trace_of(name), subject.regions, policy))
    predicted = simulate(capture(build, limits=THOROUGH)).peak_bytes
    return predicted, measure_step(build, "cpu").peak_bytes


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("policy", [recompute_everything, save_everything, save_products])
def test_a_capture_of_the_planned_model_predicts_its_peak_as_without_a_plan(
    name: str, policy: Policy
) -> None:
    predicted, measured = peaks(name, policy)
    assert predicted - measured == error_without_plan(name)


def test_computing_everything_again_lowers_the_peak() -> None:
    without = measure_step(SUBJECTS["transformer"].build, "cpu").peak_bytes
    _, again = peaks("transformer", recompute_everything)
    _, products = peaks("transformer", save_products)
    assert again < 0.55 * without
    assert again < products < 0.8 * without


def test_keeping_everything_needs_no_more_than_one_region_on_top() -> None:
    subject = SUBJECTS["transformer"]
    without = measure_step(subject.build, "cpu").peak_bytes
    _, kept = peaks("transformer", save_everything)
    call = next(call for call in trace_of("transformer").calls if call.parent == 0 and call.forward_start > 1)
    made = [op.creates for op in trace_of("transformer").ops[call.forward_start : call.forward_end]]
    one_region = sum(trace_of("transformer").storages[s].bytes for storages in made for s in storages)
    # What nothing needs is let go at the end of its region.
    assert kept <= without + one_region + 4 * RANDOM_STATE_BYTES


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("name", SUBJECTS)
def test_nothing_is_left_after_backward_or_without_one(name: str, backward: bool) -> None:
    subject = SUBJECTS[name]
    plan = plan_for(trace_of(name), subject.regions, save_products)
    model, inputs = subject.new()
    with applied(model, plan):
        model(inputs).backward()
        gc.collect()
        with no_cycle_collection(), profile_allocations() as log, log.range("step"):
            loss = model(inputs)
            if backward:
                loss.backward()
            del loss
    usage = log.usage("step")
    assert usage.end_bytes == usage.start_bytes
