"""An optimizer's step a few parameters at a time, so that what is on the host comes to the device for it.

The step itself stays torch's own, and so does the optimizer: hooks around it bring in what a few parameters
need, run the update on those alone, and take it away again. Then `optimizer.step()` finds nothing left to do.
torch's optimizers update each parameter by its own gradient and state alone, so the results are the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainfit.changes.change import NotPossible
from trainfit.changes.host_memory import arrived
from trainfit.changes.updates_in_backward import PER_PARAMETER

BY_PARAMETER = (*PER_PARAMETER, "Muon", "SparseAdam")
"""torch's optimizers that update each parameter by its own gradient and state alone."""
_stepped_so: weakref.WeakKeyDictionary[Optimizer, StepInParts] = weakref.WeakKeyDictionary()


class Mover(Protocol):
    """Something that is on the host between updates."""

    def fetch(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Bring in what the update of these parameters needs."""

    def send(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Take it away again."""


def refuse_coupled(optimizers: Iterable[Optimizer]) -> None:
    """Raise `NotPossible` for an optimizer whose step cannot be made a few parameters at a time."""
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind.__module__.split(".")[:2] != ["torch", "optim"] or kind.__name__ not in BY_PARAMETER:
            raise NotPossible(
                f"{kind.__name__} is not one of torch's optimizers that update each parameter by itself"
            )
        if not hasattr(kind.step, "__wrapped__"):
            raise NotPossible(f"the step of {kind.__name__} has been replaced by other code")


def add_mover(optimizer: Optimizer, mover: Mover) -> None:
    """Let an optimizer step in parts; what is added first comes in first, and leaves last."""
    if optimizer not in _stepped_so:
        _stepped_so[optimizer] = StepInParts(optimizer)
    _stepped_so[optimizer].movers.append(mover)


def drop_mover(optimizer: Optimizer, mover: Mover) -> None:
    """Do without it again; without any, the optimizer's step is as it was."""
    stepped = _stepped_so[optimizer]
    stepped.movers.remove(mover)
    if not stepped.movers:
        stepped.remove()
        del _stepped_so[optimizer]


class StepInParts:
    """The hooks around one optimizer's step. They do not hold the optimizer, which holds them."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Put the hooks on."""
        self.movers: list[Mover] = []
        self._groups: list[dict[str, Any]] | None = None
        """What the optimizer's groups are while its own step finds nothing to do."""
        self._before = optimizer.register_step_pre_hook(self._step_begins)
        self._after = optimizer.register_step_post_hook(self._step_ends)
        # First of all: other hooks find the groups as they are.
        others: Any = optimizer._optimizer_step_post_hooks
        others.move_to_end(self._after.id, last=False)

    def remove(self) -> None:
        """Take the hooks off."""
        self._before.remove()
        self._after.remove()

    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Do the whole step, a few parameters at a time, and leave nothing to do."""
        if next(reversed(optimizer._optimizer_step_pre_hooks)) != self._before.id:
            raise RuntimeError(
                "a hook was registered with register_step_pre_hook after trainfit.apply, and would come too "
                "late: the optimizer's step is made a few parameters at a time. Register it before."
            )
        args, kwargs = _with_closure_called(args, kwargs)
        groups = optimizer.param_groups
        devices: set[torch.device] = set()
        try:
            for group in groups:
                for few in _a_few_at_a_time(group["params"]):
                    optimizer.param_groups = [{**group, "params": few}]
                    devices |= self._update(optimizer, few)
        except BaseException:
            optimizer.param_groups = groups
            raise
        for device in devices:
            arrived(device)
        self._groups, optimizer.param_groups = groups, []
        return args, kwargs

    def _update(self, optimizer: Optimizer, few: list[Tensor]) -> set[torch.device]:
        """Run the optimizer's own step on a few parameters; return where they are meanwhile."""
        own_step: Any = type(optimizer).step
        with torch.no_grad():
            for mover in self.movers:
                mover.fetch(optimizer, few)
        try:
            own_step.__wrapped__(optimizer)
            return {parameter.device for parameter in few}
        finally:
            with torch.no_grad():
                for mover in reversed(self.movers):
                    mover.send(optimizer, few)

    def _step_ends(self, optimizer: Optimizer, *_: Any) -> None:
        assert self._groups is not None, "a step that ends has begun"
        optimizer.param_groups, self._groups = self._groups, None


def _a_few_at_a_time(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters that have a gradient: so many at once that they are as large as the largest alone."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    most = max((size_of(parameter) for parameter in trained), default=0)
    few: list[Tensor] = []
    for parameter in trained:
        if few and sum(map(size_of, few)) + size_of(parameter) > most:
            yield few
            few = []
        few.append(parameter)
    if few:
        yield few


def size_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's values."""
    return tensor.numel() * tensor.element_size()


def _with_closure_called(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Call the closure that `step` was given, and let `step` itself get its result without calling it."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return args[:1], {"closure": lambda: loss}
