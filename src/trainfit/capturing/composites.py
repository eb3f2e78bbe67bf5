"""Composite operators of torch that take another path while a dispatch mode is active.

In C++ they ask whether a tensor is of a subclass, which is answered yes to everything under a mode, and then
avoid working in place. While a capture runs, each has a kernel of ours that takes the ordinary path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_linear = torch.ops.aten.linear.default


def linear(tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Add the bias in place where it cannot be fused into the product."""
    fused = tensor.dim() == 2 or (tensor.is_contiguous() and bias is not None and bias.dim() == 1)
    if bias is None or fused:
        result: torch.Tensor = _linear._op_dk(_COMPOSITE, tensor, weight, bias)
        return result
    return torch.matmul(tensor, weight.t()).add_(bias)


@contextlib.contextmanager
def ordinary_paths() -> Iterator[None]:
    """Install the ordinary paths for the length of a capture."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("linear", linear, "AutogradCPU")
        yield
    finally:
        library._destroy()
