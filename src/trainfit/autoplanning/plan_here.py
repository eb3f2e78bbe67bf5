"""`autoplan`: the step of a loop that is about to run is captured, planned for this machine, made to fit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainfit import capturing
from trainfit.allocator.named_options import named_options
from trainfit.applying import apply, runs_plan
from trainfit.applying.attach import attach_plan
from trainfit.applying.planned_model import Promise
from trainfit.autoplanning.agreed_plan import OwnStep, agree
from trainfit.autoplanning.announcing import announce
from trainfit.autoplanning.at_hand import Size, Wishes, allocator_setting, budget_for, device_for
from trainfit.autoplanning.autoplan_result import AutoPlan
from trainfit.autoplanning.rank_answers import Ranks, own_cluster
from trainfit.capturing.distributed.renewed_reducers import renew_reducers
from trainfit.capturing.lent_tensors import LentState
from trainfit.capturing.random_stream import RandomState
from trainfit.devices.device_table import Device
from trainfit.errors import OptionError, PlanError, StepError
from trainfit.plans.plan import Plan
from trainfit.steps.step import Step, count_inputs
from trainfit.traces.ranks import Cluster

Root = tuple[str, object]


def autoplan(
    model: nn.Module,
    step: Callable[..., Any] | Step,
    *batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    budget: Size | None = None,
    device: str | Device | None = None,
    reserve: Size | None = None,
) -> AutoPlan:
    """Make a model fit that is about to be trained: look at a step, plan it for this machine, apply the plan.

    `step` runs one training step (forward, backward, optimizer, zeroing of gradients) on `model`, and is
    called as `step(*batch)`; or it is a `Step`. It is executed on tensors without memory: afterwards
    weights, gradients, optimizer state, random generators and all Python state that it can reach are as
    before. If the step fits anyway, nothing is done; if no plan makes it fit, `BudgetTooSmall` says what is
    missing. Optimizers are found where the step refers to them; `optimizer` names one that it hides.

    A plan may use what is free on the device that the model is on: all of it on a CPU, on a GPU less a
    margin. `reserve` leaves something else free, `budget` says it outright, `device` plans for another.
    """
    wishes = Wishes(budget, device, reserve)
    if isinstance(step, Step):
        if batch:
            raise OptionError("a Step has its batch itself: leave it out, or pass a function of the batch.")
        if step.model is not model:
            raise StepError("the model is not the one of the Step: pass step.model, or a function.")
        return fit_here(step, [("step", step.run)], wishes)
    if not isinstance(model, nn.Module):
        raise StepError(f"autoplan takes a torch.nn.Module and its step, got {type(model).__name__}.")
    if not callable(step):
        raise StepError(
            "autoplan takes a function that runs one training step, or a trainfit.Step, got a "
            f"{type(step).__name__}."
        )
    function = step
    samples, tokens = count_inputs(batch[0] if len(batch) == 1 else batch)
    whole = Step(model, optimizer, lambda: function(*batch), samples=samples, tokens=tokens)
    return fit_here(whole, [("step", function), ("batch", batch)], wishes)


def fit_here(step: Step, roots: list[Root], wishes: Wishes, apart: Iterable[object] = ()) -> AutoPlan:
    """Look at a step of the running program, and apply a plan to its model if it needs one.

    `roots` are what the step refers to, besides its model and optimizer: all that may change in it, except
    for what is set `apart`.
    """
    ranks = Ranks(own_cluster())
    if runs_plan(step.model):
        raise PlanError("the model runs a plan already: call trainfit.remove(model) before making another.")
    with _generators_kept():
        found = _found(step, roots, wishes, apart, ranks)
    if found.plan is not None:
        _apply(step.model, found.plan, ranks)
    if ranks.rank == 0:
        announce(found.text)
    return found


def _found(step: Step, roots: list[Root], wishes: Wishes, apart: Iterable[object], ranks: Ranks) -> AutoPlan:
    """Capture the step, and find a plan if it needs one, for all processes that train together."""
    begin = time.perf_counter()
    looked: list[OwnStep] = []
    # A process that fails here has to be heard by the others.
    ranks.each(lambda: looked.append(_captured(step, roots, wishes, apart, ranks.cluster)))
    [own] = looked
    agreed = agree(own, ranks)
    need = agreed.needs[ranks.rank]
    seconds = time.perf_counter() - begin
    return AutoPlan(
        agreed.plan is None,
        agreed.plan,
        own.device,
        own.budget_bytes,
        need.needed_bytes,
        own.trace,
        seconds,
        agreed.warnings or own.trace.warnings,
        agreed.needs,
    )


def _captured(
    step: Step, roots: list[Root], wishes: Wishes, apart: Iterable[object], cluster: Cluster | None
) -> OwnStep:
    device = device_for(step.model, wishes, cluster)
    lent = LentState(("model", step.model), ("optimizer", step.optimizer), *roots, apart=apart)
    if step.optimizer is None:
        step = replace(step, optimizer=_optimizers(lent, step.model))
    budget_bytes = budget_for(device, lent, wishes, cluster)
    name = type(step.model).__name__

    def build() -> Step:
        renew_reducers(lent.python.replicas)
        return step

    trace = capturing.capture(build, device=device, target=name, lent_state=lent, cluster=cluster)
    return OwnStep(trace, device, budget_bytes, named_options(allocator_setting()))


def _apply(model: nn.Module, plan: Plan, ranks: Ranks) -> None:
    if plan.cluster is None or plan.cluster.rank == ranks.rank:
        apply(model, plan)
    else:
        # This process has replayed it with its own sizes, which may be larger than those it was made for.
        attach_plan(model, plan, promise=replace(Promise.of(plan), first=None))


def _optimizers(lent: LentState, model: nn.Module) -> list[torch.optim.Optimizer] | None:
    """Return the optimizers that the step refers to and that train the model; not what wraps another."""
    own = {id(parameter) for parameter in model.parameters()}
    found = [
        optimizer
        for optimizer in lent.python.optimizers
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"])
    ]
    numbers = {id(optimizer) for optimizer in found}
    return [one for one in found if id(getattr(one, "optimizer", None)) not in numbers] or None


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """Put all random generators back: captures seed them, and measuring the machine's speed draws numbers."""
    host = RandomState()
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.init()  # what was seeded before now belongs to its generators
    states = torch.cuda.get_rng_state_all() if on_gpus else []
    try:
        yield
    finally:
        host.restore()
        if on_gpus:
            torch.cuda.set_rng_state_all(states)
