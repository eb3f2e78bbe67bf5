"""Metadata of operators whose fake kernel is missing or wrong in torch 2.13: the one place to mend them.

Each function takes fake tensors and returns fake tensors with the metadata of the real kernel's results.
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


def cudnn_rnn(
    tensor: torch.Tensor,
    weight: list[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: list[int],
    dropout_state: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Run all layers of a recurrent network; torch's fake kernel makes no reserve space.

    cuDNN does not say what it keeps for backward. Assumed here: per step, layer and direction the gates, the
    state and the output (6, 5 or 2 values per hidden unit for LSTM, GRU and plain layers).
    """
    directions = 2 if bidirectional else 1
    width = directions * (proj_size or hidden_size)
    kept = {2: 6, 3: 5}.get(mode, 2)
    steps = tensor.shape[0] * tensor.shape[1]
    reserve = steps * num_layers * directions * hidden_size * kept * tensor.element_size() if train else 0
    return (
        tensor.new_empty((*tensor.shape[:2], width)),
        torch.empty_like(hx),
        torch.empty_like(cx) if cx is not None else tensor.new_empty(0),
        tensor.new_empty(reserve, dtype=torch.uint8),
        weight_buf,
    )


def cudnn_rnn_backward(
    tensor: torch.Tensor,
    weight: list[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *_: Any,
) -> tuple[Any, ...]:
    """Make the gradients of the input, the initial states and every weight."""
    grad_cx = torch.empty_like(cx) if cx is not None else tensor.new_empty(0)
    return torch.empty_like(tensor), torch.empty_like(hx), grad_cx, [torch.empty_like(w) for w in weight]


def fused_rms_norm(
    tensor: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise; the kernel also returns one fp32 value per row."""
    rows = (*tensor.shape[: tensor.dim() - len(normalized_shape)], *(1 for _ in normalized_shape))
    return torch.empty_like(tensor), tensor.new_empty(rows, dtype=torch.float32)


def fused_rms_norm_backward(
    gradient: torch.Tensor,
    tensor: torch.Tensor,
    normalized_shape: list[int],
    scale: torch.Tensor,
    weight: torch.Tensor | None,
    mask: list[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Make the gradients that are asked for."""
    return (
        torch.empty_like(tensor) if mask[0] else None,
        torch.empty_like(weight) if mask[1] and weight is not None else None,
    )


def native_batch_norm(tensor: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """Normalise; a GPU keeps the statistics in fp32 at least, and the fake kernel needs CUDA to say so."""
    training = args[4]
    if tensor.device.type == "cpu":
        result: tuple[torch.Tensor, ...] = aten.native_batch_norm.default(tensor, *args)
        return result
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    statistics = [tensor.new_empty((tensor.shape[1] if training else 0,), dtype=dtype) for _ in range(2)]
    return torch.empty_like(tensor), *statistics


def native_batch_norm_backward(
    gradient: torch.Tensor, tensor: torch.Tensor, weight: torch.Tensor | None, *args: Any
) -> tuple[torch.Tensor | None, ...]:
    """Make the gradients that are asked for; a GPU's library always makes that of the input."""
    mask = args[-1]
    result: tuple[torch.Tensor, ...] = aten.native_batch_norm_backward.default(
        gradient, tensor, weight, *args
    )
    return (result[0] if mask[0] or tensor.device.type != "cpu" else None, *result[1:])


OWN_KERNELS: dict[OpOverload, Callable[..., Any]] = {
    aten._grouped_mm.default: grouped_mm,
    aten.native_batch_norm.default: native_batch_norm,
    aten.native_batch_norm_backward.default: native_batch_norm_backward,
    aten._fused_rms_norm.default: fused_rms_norm,
    aten._fused_rms_norm_backward.default: fused_rms_norm_backward,
    aten._cudnn_rnn.default: cudnn_rnn,
    aten._cudnn_rnn_backward.default: cudnn_rnn_backward,
}
