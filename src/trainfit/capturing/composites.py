"""Composite operators of torch that take another path while a dispatch mode is active.

In C++ they ask whether a tensor is of a subclass. Under a mode the answer is always yes, and they avoid
working in place. While a capture runs, each has a kernel of ours that takes the ordinary path.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from trainfit.capturing import derivatives
from trainfit.capturing.handlers import known_numbers

if TYPE_CHECKING:
    from trainfit.capturing.dispatch import CaptureMode

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
aten = torch.ops.aten
_linear = aten.linear.default
_attention = aten._scaled_dot_product_attention_math.default


def linear(tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Add the bias in place where it cannot be fused into the product."""
    fused = tensor.dim() == 2 or (tensor.is_contiguous() and bias is not None and bias.dim() == 1)
    if bias is None or fused:
        result: torch.Tensor = _linear._op_dk(_COMPOSITE, tensor, weight, bias)
        return result
    return torch.matmul(tensor, weight.t()).add_(bias)


def attention_by_formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in plain operators; the mask is added to the scores in place."""
    if dropout_mask is not None or (attn_mask is None and not is_causal):
        result: tuple[torch.Tensor, torch.Tensor] = _attention._op_dk(
            _COMPOSITE, query, key, value, attn_mask, dropout_p, is_causal, dropout_mask,
            scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
        return result
    dtype = query.dtype
    if dtype in (torch.float16, torch.bfloat16) and not _half_precision_sums():
        query, key, value = query.float(), key.float(), value.float()
    # Half of the scale goes to each factor, which keeps the products small.
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    root = abs(scale) ** 0.5
    query = aten.mul.Scalar(query, math.copysign(root, scale))
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    assert attn_mask is not None
    if attn_mask.dtype is torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, torch.scalar_tensor(float("-inf"), dtype=query.dtype))
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    # The same name again: torch frees the scores when it has the weights.
    weights = torch.matmul(query, aten.mul.Scalar(key.transpose(-2, -1), root)).add_(attn_mask)
    weights = aten._safe_softmax.default(weights, -1)
    weights = torch.dropout(weights, dropout_p, dropout_p > 0)
    narrow = weights.to(dtype)
    return torch.matmul(weights, value).to(dtype), narrow


def ctc_loss(
    mode: CaptureMode,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Read the lengths as numbers, so that backward does not save the tensors."""
    lengths = [each.to(torch.int64).contiguous() for each in (input_lengths, target_lengths)]
    inputs, outputs = (known_numbers(mode, each) for each in lengths)
    loss: torch.Tensor = aten.ctc_loss.IntList(
        log_probs, targets, inputs, outputs, blank, reduction, zero_infinity
    )
    return loss


def _half_precision_sums() -> bool:
    return bool(torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed())


@contextlib.contextmanager
def ordinary_paths(mode: CaptureMode, device: str) -> Iterator[None]:
    """Install the ordinary paths, of operators and of backward formulas, for the length of a capture."""
    library = torch.library.Library("aten", "IMPL")
    try:
        derivatives.install(library, mode, device)
        library.impl("linear", linear, "AutogradCPU")
        library.impl("_scaled_dot_product_attention_math", attention_by_formula, "AutogradCPU")
        library.impl("ctc_loss.Tensor", functools.partial(ctc_loss, mode), "AutogradCPU")
        yield
    finally:
        library._destroy()
