"""Carries out an optimizer whose state is on the host: it comes to the device for its own update alone.

The optimizer stays the object that the user has; its state, as `optimizer.state` and `state_dict()` show it,
is on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainfit.changes.host_memory import arrived, to_device, to_host
from trainfit.changes.step_in_parts import add_mover, drop_mover, refuse_coupled


def keep_state_on_host(optimizers: Iterable[Optimizer]) -> list[OffloadedState]:
    """Keep the state of optimizers on the host, until `remove`; `NotPossible` if one cannot be treated so."""
    optimizers = list(optimizers)
    refuse_coupled(optimizers)
    return [OffloadedState(optimizer) for optimizer in optimizers]


class OffloadedState:
    """Keeps the state of one optimizer on the host."""

    def __init__(self, optimizer: Optimizer) -> None:
        """Move what there is already, and what comes."""
        # Weak, so that the optimizer does not keep itself alive through its hooks.
        self._optimizer = weakref.ref(optimizer)
        self._homes: dict[Tensor, dict[str, Tensor]] = {}
        """The host's memory of each parameter's state."""
        self._loaded = optimizer.register_load_state_dict_post_hook(self._send_all)
        self._send_all(optimizer)
        add_mover(optimizer, self)

    def remove(self) -> None:
        """Bring everything back to where the parameters are."""
        self._loaded.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            drop_mover(optimizer, self)
            self.fetch(optimizer, list(self._homes))
        self._homes.clear()

    def _send_all(self, optimizer: Optimizer) -> None:
        devices = {v.device for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)}
        self.send(optimizer, list(optimizer.state))
        for device in devices:
            arrived(device)

    @torch.no_grad()
    def send(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Copy the state of parameters to the host, and free it on the device."""
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            homes = self._homes.setdefault(parameter, {})
            for name, value in state.items():
                if _is_large(value) and value is not homes.get(name):
                    state[name] = homes[name] = to_host(value, homes.get(name))

    @torch.no_grad()
    def fetch(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Copy the state of parameters to the device; it keeps its place on the host."""
        for parameter in parameters:
            state = optimizer.state.get(parameter, {})
            for name, home in self._homes.get(parameter, {}).items():
                if state.get(name) is home:
                    state[name] = to_device(home, parameter.device)


def _is_large(value: Any) -> bool:
    """Whether a part of a state is worth moving; counters of steps stay where they are."""
    return isinstance(value, Tensor) and value.dim() > 0
