"""Carries out an optimizer whose state is on the host: it comes to the device for its own update alone.

`optimizer.step()` goes over the parameters a few at a time. The state of those few is copied to the device,
the optimizer's own update runs on them, and what it made of the state is copied back. The optimizer stays the
object that the user has; its state, as `optimizer.state` and `state_dict()` show it, is on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from trainfit.changes.change import NotPossible
from trainfit.changes.host_memory import arrived, to_device, to_host
from trainfit.changes.updates_in_backward import PER_PARAMETER

BY_PARAMETER = (*PER_PARAMETER, "Muon", "SparseAdam")
"""torch's optimizers that keep a state for each parameter, and update each by its own state alone."""
Group = dict[str, Any]


def keep_state_on_host(optimizers: Iterable[torch.optim.Optimizer]) -> list[OffloadedState]:
    """Keep the state of optimizers on the host, until `remove`; `NotPossible` if one cannot be treated so."""
    optimizers = list(optimizers)
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind.__module__.split(".")[:2] != ["torch", "optim"] or kind.__name__ not in BY_PARAMETER:
            raise NotPossible(
                f"{kind.__name__} is not one of torch's optimizers that update each parameter by a state of "
                "its own"
            )
        if not hasattr(kind.step, "__wrapped__"):
            raise NotPossible(f"the step of {kind.__name__} has been replaced by other code")
    return [OffloadedState(optimizer) for optimizer in optimizers]


class OffloadedState:
    """Keeps the state of one optimizer on the host."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Move what there is already, and put the hooks on."""
        # Weak, so that the optimizer does not keep itself alive through its hooks.
        self._optimizer = weakref.ref(optimizer)
        self._homes: dict[Tensor, dict[str, Tensor]] = {}
        """The host's memory of each parameter's state."""
        self._groups: list[Group] | None = None
        """What the optimizer's groups are while its own step finds nothing to do."""
        self._before = optimizer.register_step_pre_hook(self._step_begins)
        after = optimizer.register_step_post_hook(self._step_ends)
        # First of all: other hooks find the groups as they are.
        others: Any = optimizer._optimizer_step_post_hooks
        others.move_to_end(after.id, last=False)
        self._hooks = [
            self._before,
            after,
            optimizer.register_load_state_dict_post_hook(self._send_all),
        ]
        self._send_all(optimizer)

    def remove(self) -> None:
        """Bring everything back to where the parameters are."""
        for hook in self._hooks:
            hook.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            for parameter in self._homes:
                self._fetch(optimizer, [parameter])
        self._homes.clear()

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Do the whole step, a few parameters at a time, and leave nothing to do."""
        if next(reversed(optimizer._optimizer_step_pre_hooks)) != self._before.id:
            raise RuntimeError(
                "a hook was registered with register_step_pre_hook after the optimizer's state was moved to "
                "the host, and would come too late: register it before trainfit.apply."
            )
        args, kwargs = _with_closure_called(args, kwargs)
        groups = optimizer.param_groups
        own_step: Any = type(optimizer).step
        try:
            for group in groups:
                for few in _a_few_at_a_time(group["params"]):
                    with torch.no_grad():
                        self._fetch(optimizer, few)
                    optimizer.param_groups = [{**group, "params": few}]
                    own_step.__wrapped__(optimizer)
                    self._send(optimizer, few)
        except BaseException:
            optimizer.param_groups = groups
            raise
        for device in {parameter.device for parameter in self._homes}:
            arrived(device)
        self._groups, optimizer.param_groups = groups, []
        return args, kwargs

    def _step_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        assert self._groups is not None, "a step that ends has begun"
        optimizer.param_groups, self._groups = self._groups, None

    def _send_all(self, optimizer: torch.optim.Optimizer) -> None:
        self._send(optimizer, list(optimizer.state))
        for device in {parameter.device for parameter in self._homes}:
            arrived(device)

    @torch.no_grad()
    def _send(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
        """Copy the state of parameters to the host, and free it on the device."""
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            homes = self._homes.setdefault(parameter, {})
            for name, value in state.items():
                if _is_large(value) and value is not homes.get(name):
                    state[name] = homes[name] = to_host(value, homes.get(name))

    @torch.no_grad()
    def _fetch(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
        """Copy the state of parameters to the device; it keeps its place on the host."""
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            for name, home in self._homes.get(parameter, {}).items():
                if state.get(name) is home:
                    state[name] = to_device(home, parameter.device)


def _is_large(value: Any) -> bool:
    """Whether a part of a state is worth moving; counters of steps are where they are."""
    return isinstance(value, Tensor) and value.dim() > 0


def _a_few_at_a_time(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters that have a gradient: so many at once that they are as large as the largest alone."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    most = max((_bytes(parameter) for parameter in trained), default=0)
    few: list[Tensor] = []
    for parameter in trained:
        if few and sum(map(_bytes, few)) + _bytes(parameter) > most:
            yield few
            few = []
        few.append(parameter)
    if few:
        yield few


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _with_closure_called(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Call the closure that `step` was given, and let `step` itself get its result without calling it."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return args[:1], {"closure": lambda: loss}
