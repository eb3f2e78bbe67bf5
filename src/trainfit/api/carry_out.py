"""`apply`, `remove` and `applied`: a model runs a plan, whichever of both kinds it is.

A `Plan` is carried out by `applying`, op by op, a `CompiledPlan` by torch.compile (`compiling`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from trainfit.applying import apply as apply_eagerly
from trainfit.applying import remove as remove_eagerly
from trainfit.applying.attach import runs_plan
from trainfit.applying.way_changes import Optimizers
from trainfit.compiling.carried_plan import apply_compiled_plan, carried_plan, remove_compiled_plan
from trainfit.errors import PlanError
from trainfit.plans.compiled_plan import CompiledPlan
from trainfit.plans.plan import Plan
from trainfit.plans.ways import Way


def apply(
    model: nn.Module, plan: Plan | Way | CompiledPlan, *, optimizer: Optimizers | None = None
) -> nn.Module:
    """Make `model` run `plan`, and return it.

    It computes what it computed before. Forward without gradients is not changed at all. Where the model does
    something else than the plan's trace, everything from there to the end of the region is kept, with one
    warning. There is one, too, if the model is not what the plan was made for: another class, size or dtype,
    and, when it runs, another kind of device or larger inputs.

    A `Way` (`trainfit.fit`) is a plan with changes: those that its lines of code leave to `apply` are made,
    the loss in chunks and updates in backward, for which the `optimizer` is needed.

    A `CompiledPlan` (`trainfit plan --compile`) is carried out by torch.compile, before or after whose call
    it is applied. A graph that computes something else is left to torch, with one warning.
    """
    if not isinstance(plan, CompiledPlan):
        if isinstance(model, nn.Module) and carried_plan(model) is not None:
            raise PlanError(
                "the model runs a plan already: call trainfit.remove(model) before applying another."
            )
        return apply_eagerly(model, plan, optimizer=optimizer)
    if not isinstance(model, nn.Module):
        raise PlanError(f"a plan is applied to a torch.nn.Module, got {type(model).__name__}.")
    if optimizer is not None:
        raise PlanError("a plan says nothing about the optimizer; leave optimizer= out.")
    if runs_plan(model):
        raise PlanError("the model runs a plan already: call trainfit.remove(model) before applying another.")
    return apply_compiled_plan(model, plan)


def remove(model: nn.Module) -> nn.Module:
    """Take the plan or the way off `model`, which is then as it was before, and return it."""
    return model if remove_compiled_plan(model) else remove_eagerly(model)


@contextlib.contextmanager
def applied(
    model: nn.Module, plan: Plan | Way | CompiledPlan, *, optimizer: Optimizers | None = None
) -> Iterator[nn.Module]:
    """Apply a plan or a way for the length of a block."""
    apply(model, plan, optimizer=optimizer)
    try:
        yield model
    finally:
        remove(model)
