"""The changes of a way that `apply` makes to a model and its optimizer, besides the plan, and takes back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from trainfit.changes.change import NotPossible
from trainfit.changes.chunked_head import chunk_loss
from trainfit.changes.kinds.chunked_loss import IN_CHUNKS
from trainfit.changes.kinds.optimizer_in_backward import FUSED_IN_BACKWARD, IN_BACKWARD
from trainfit.changes.kinds.optimizer_kernels import FUSED, use_kernels
from trainfit.changes.kinds.parameters_on_host import PARAMETERS_ON_HOST
from trainfit.changes.kinds.state_on_host import STATE_ON_HOST
from trainfit.changes.offloaded_parameters import keep_parameters_on_host
from trainfit.changes.offloaded_state import keep_state_on_host
from trainfit.changes.step_with_changes import position
from trainfit.changes.updates_in_backward import update_in_backward
from trainfit.errors import PlanError
from trainfit.plans.ways import ChangeMade, Way

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
_undoing: weakref.WeakKeyDictionary[nn.Module, list[Callable[[], None]]] = weakref.WeakKeyDictionary()


def make_changes(model: nn.Module, way: Way, optimizer: Optimizers | None) -> None:
    """Make what `apply` can make; all of it, or nothing if something is wrong."""
    undo: list[Callable[[], None]] = []
    try:
        for change in sorted(way.changes, key=lambda change: position(change.kind)):
            if change.by_apply:
                undo += _made(model, change, _several(optimizer))
    except NotPossible as error:
        for one in reversed(undo):
            one()
        raise PlanError(f"{change.name} cannot be done here: {error}.") from None
    if undo:
        _undoing[model] = undo


def take_back(model: nn.Module) -> bool:
    """Undo what was made, and say whether anything was."""
    undo = _undoing.pop(model, [])
    for one in reversed(undo):
        one()
    return bool(undo)


def has_changes(model: nn.Module) -> bool:
    """Whether changes of a way were made to the model."""
    return model in _undoing


def _made(
    model: nn.Module, change: ChangeMade, optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[Callable[[], None]]:
    match change.kind, change.value:
        case "loss", value if value == IN_CHUNKS:
            yield chunk_loss(model)
        case "optimizer", value if value in (IN_BACKWARD, FUSED_IN_BACKWARD):
            _refuse_without(optimizers, change)
            if value == FUSED_IN_BACKWARD:
                yield use_kernels(optimizers, FUSED)
            for one in update_in_backward(model, optimizers):
                yield one.remove
        case "parameters", value if value == PARAMETERS_ON_HOST:
            _refuse_without(optimizers, change)
            yield keep_parameters_on_host(model, optimizers).remove
        case "state", value if value == STATE_ON_HOST:
            _refuse_without(optimizers, change)
            for state in keep_state_on_host(optimizers):
                yield state.remove
        case _:
            raise PlanError(f"this version of trainfit does not know the change {change.name!r}.")


def _refuse_without(optimizers: Sequence[torch.optim.Optimizer], change: ChangeMade) -> None:
    if not optimizers:
        raise PlanError(
            f"{change.name} needs the optimizer: trainfit.apply(model, way, optimizer=optimizer)."
        )


def _several(optimizer: Optimizers | None) -> tuple[torch.optim.Optimizer, ...]:
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
