"""Carries out updates in backward: a hook on every parameter, which runs the optimizer on it alone.

The optimizer stays the object that the user has, with its state and its groups; its `step` afterwards finds
nothing left to do. Each of torch's optimizers treats parameters separately, so the results are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trainfit.changes.change import NotPossible

PER_PARAMETER = (
    *("Adam", "AdamW", "SGD", "Adagrad", "Adadelta", "Adamax", "ASGD"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "Adafactor"),
)
"""torch's optimizers, which look at one parameter at a time."""


def update_in_backward(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], *, first_looks: bool = False
) -> list[UpdateInBackward]:
    """Let optimizers update parameters in backward, until `remove`.

    With `first_looks`, the first step is an ordinary one, in which it is found out whether something comes
    between gradients and updates; `NotPossible` says what.
    """
    found = []
    for optimizer in optimizers:
        if type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
            raise NotPossible(f"{type(optimizer).__name__} is not one of torch's optimizers")
        found.append(UpdateInBackward(optimizer, looks=first_looks))
    covered = {id(p) for one in found for p in one.parameters}
    if any(p.requires_grad and id(p) not in covered for p in model.parameters()):
        raise NotPossible("the optimizer does not have all parameters that get gradients")
    return found


class UpdateInBackward:
    """Updates the parameters of one optimizer as they get their gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, looks: bool) -> None:
        """Put the hooks on; `looks`: the first step only watches."""
        self._optimizer = optimizer
        self._looks = looks
        self._seen: dict[int, int] = {}
        """Of each gradient, how often it had been written to when it was complete."""
        self._updated: set[int] = set()
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._gradient_is_there)
            for p in self.parameters
            if p.requires_grad
        ]
        self._hooks.append(optimizer.register_step_pre_hook(self._step_begins))
        self._inside = False

    @property
    def parameters(self) -> list[torch.Tensor]:
        """All that the optimizer updates."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def remove(self) -> None:
        """Let the optimizer do its work in its own step again."""
        for hook in self._hooks:
            hook.remove()

    def _gradient_is_there(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if self._looks:
            if id(parameter) in self._seen:
                raise NotPossible("gradients are accumulated over several backwards")
            self._seen[id(parameter)] = gradient._version
            return
        if id(parameter) in self._updated:
            raise RuntimeError(
                "a parameter got a second gradient before optimizer.step(): gradients cannot be accumulated "
                "while the optimizer runs in backward."
            )
        self._updated.add(id(parameter))
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [{**self._group_of[id(parameter)], "params": [parameter]}]
        self._inside = True
        try:
            self._optimizer.step()
        finally:
            self._inside = False
            self._optimizer.param_groups = groups
        parameter.grad = None

    def _step_begins(self, *_: Any) -> None:
        if self._inside:
            return
        self._updated.clear()
        if not self._looks:
            return
        self._looks = False
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is not None and gradient._version != self._seen.get(id(parameter)):
                raise NotPossible("gradients are clipped, scaled or written to before the optimizer's step")
        self._seen.clear()
