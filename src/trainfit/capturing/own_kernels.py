"""Metadata of operators whose fake kernel is missing or wrong in torch 2.13: the one place to mend them.

Each function takes fake tensors and returns fake tensors of the metadata that the real kernel gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten


def grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply groups of matrices; the fake kernel refuses fp32, the real one takes it.

    Where an operand is 2-D the groups lie along one of its dimensions, with ends in `offs`: over rows
    (2-D x 3-D), over columns (3-D x 2-D), or over the inner dimension (2-D x 2-D, one matrix per group).
    """
    dtype = out_dtype or a.dtype
    if a.dim() == 2 and b.dim() == 2:
        assert offs is not None
        return a.new_empty((offs.shape[0], a.shape[0], b.shape[1]), dtype=dtype)
    if a.dim() == 2:
        return a.new_empty((a.shape[0], b.shape[2]), dtype=dtype)
    if b.dim() == 2:
        return a.new_empty((a.shape[1], b.shape[1]), dtype=dtype)
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]), dtype=dtype)


OWN_KERNELS: dict[OpOverload, Callable[..., Any]] = {
    aten._grouped_mm.default: grouped_mm,
}
