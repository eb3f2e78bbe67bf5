"""The plain tensors that a tensor consists of (sparse ones and subclasses are flattened), or any value."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@functools.cache
def is_plain(kind: type) -> bool:
    """Whether a type leaves operators to torch: `Tensor`, and subclasses without `__torch_dispatch__`."""
    if kind in (torch.Tensor, nn.Parameter):
        return True
    disabled = torch._C._disabled_torch_dispatch_impl
    return getattr(kind, "__torch_dispatch__", disabled) is disabled


@functools.cache
def is_distributed(kind: type) -> bool:
    """Whether tensors of a type are parts of larger ones, of which this process has a plain tensor.

    Loading the class takes a second; who has such a tensor has loaded it.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and issubclass(kind, module.DTensor)


def strided_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors with storages that a tensor consists of: itself, or its flattened parts."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)  # inside of `torch.func` transforms
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # a distributed tensor also lists its mesh
                yield from strided_parts(part)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout is torch.strided and not tensor.is_meta:
        yield tensor


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments or results: in containers, and in objects such as a model's output."""
    pending, seen = [value], set()
    while pending:
        one = pending.pop()
        if isinstance(one, torch.Tensor):
            yield one
            continue
        if id(one) in seen or isinstance(one, str | bytes | int | float | nn.Module | type):
            continue
        seen.add(id(one))
        if isinstance(one, dict):
            pending.extend(reversed(list(one.values())))
        elif isinstance(one, list | tuple | set):
            pending.extend(reversed(list(one)))
        elif hasattr(one, "__dict__"):
            pending.extend(reversed(list(vars(one).values())))
