"""What is there during the whole step, whatever the plan: parameters, buffers, optimizer state."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves


def bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of the storages of tensors, each once; what is no tensor counts nothing."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and torch._C._has_storage(tensor):
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return bytes_of((*model.parameters(), *model.buffers()))


def device_of(model: nn.Module) -> str:
    """Return the kind of device that a model is on."""
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    return "cuda" if "cuda" in kinds else "cpu"


def optimizer_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of an optimizer's state; before its first step those that it will have."""
    if optimizer is None:
        return 0
    if optimizer.state:
        return bytes_of(tree_leaves([list(state.values()) for state in optimizer.state.values()]))
    try:
        return _bytes_after_a_step(optimizer)
    except Exception as error:
        warnings.warn(
            f"the state of {type(optimizer).__name__} is not counted: it cannot be made without memory "
            f"({type(error).__name__}). Call compile after the first step, or say its size as other=.",
            stacklevel=2,
        )
        return 0


def _bytes_after_a_step(optimizer: torch.optim.Optimizer) -> int:
    """Let an optimizer of the same kind take a step on tensors without memory."""
    with FakeTensorMode(), torch.device("cpu"):
        groups = []
        for group in optimizer.param_groups:
            made = []
            for parameter in group["params"]:
                if parameter.requires_grad:
                    value = torch.empty(parameter.shape, dtype=parameter.dtype, requires_grad=True)
                    value.grad = torch.empty(parameter.shape, dtype=parameter.dtype)
                    made.append(value)
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": made})
        taken = inspect.signature(type(optimizer).__init__).parameters
        defaults = {name: value for name, value in optimizer.defaults.items() if name in taken}
        twin: Any = type(optimizer)(groups, **defaults)
        twin.step()
        return bytes_of(tree_leaves([list(state.values()) for state in twin.state.values()]))
