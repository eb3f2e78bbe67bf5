"""`autoplan`: the step of a loop that is about to run is captured, planned for this machine, made to fit."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainfit import capturing
from trainfit.allocator.device_memory import StepMemory
from trainfit.allocator.named_options import named_options
from trainfit.api.choose import plan_step, refuse_infeasible
from trainfit.api.request import Request
from trainfit.applying import apply, runs_plan
from trainfit.autoplanning.at_hand import Size, Wishes, allocator_setting, budget_for, device_for
from trainfit.autoplanning.autoplan_result import AutoPlan
from trainfit.capturing.lent_tensors import LentState
from trainfit.capturing.random_stream import RandomState
from trainfit.devices.device_table import Device
from trainfit.errors import OptionError, PlanError, StepError
from trainfit.steps.step import Step, count_inputs
from trainfit.traces.simulate import simulate

_SECONDS_LIMIT = 10.0
"""Training waits meanwhile."""
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
    refuse_several_processes()
    if runs_plan(step.model):
        raise PlanError("the model runs a plan already: call trainfit.remove(model) before making another.")
    with _generators_kept():
        found = _found(step, roots, wishes, apart)
    if found.plan is not None:
        apply(step.model, found.plan)
    return found


def _found(step: Step, roots: list[Root], wishes: Wishes, apart: Iterable[object]) -> AutoPlan:
    """Capture the step, and find a plan if it needs one."""
    begin = time.perf_counter()
    device = device_for(step.model, wishes)
    lent = LentState(("model", step.model), ("optimizer", step.optimizer), *roots, apart=apart)
    if step.optimizer is None:
        step = replace(step, optimizer=_optimizers(lent, step.model))
    budget_bytes = budget_for(device, lent, wishes)
    name = type(step.model).__name__
    trace = capturing.capture(lambda: step, device=device, target=name, lent_state=lent)
    del lent
    options = named_options(allocator_setting())
    memory = StepMemory(simulate(trace), device, options)
    fits = memory.runs_within(budget_bytes) and memory.smallest_bytes <= budget_bytes
    plan, warnings = None, trace.warnings
    if not fits:
        result = plan_step(Request(trace, device, allocator=options), budget_bytes, _SECONDS_LIMIT)
        refuse_infeasible(result)
        plan, warnings = result.plan, result.warnings
    seconds = time.perf_counter() - begin
    return AutoPlan(fits, plan, device, budget_bytes, memory.smallest_bytes, trace, seconds, warnings)


def refuse_several_processes() -> None:
    """Refuse a process that trains together with others."""
    distributed = torch.distributed
    count = int(os.environ.get("WORLD_SIZE") or 1)
    if distributed.is_available() and distributed.is_initialized():
        count = distributed.get_world_size()
    if count > 1:
        raise PlanError(
            f"this is one of {count} processes that train together, and a plan that is made while they run "
            "is of one process alone. Make it beforehand, and give every process the same: trainfit plan "
            f"train.py:build --world-size {count} -o plan.json, then PlanCallback('plan.json') or "
            "trainfit.apply(model, trainfit.load_plan('plan.json'))."
        )


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
