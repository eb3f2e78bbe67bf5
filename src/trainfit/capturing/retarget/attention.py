"""Which attention kernel a GPU runs: flash, memory-efficient, or the formula in plain operators.

The order and the conditions are those of torch 2.13 on a GPU of compute capability 8.0 or higher (see the
documentation of `torch.nn.attention.SDPBackend`): flash needs 16-bit dtypes, no mask and a head size of at
most 256; memory-efficient takes fp32 and masks, but not grouped query heads; all else runs as a formula.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

aten = torch.ops.aten
_LARGEST_FLASH_HEAD = 256
_FLASH_HEAD_MULTIPLE = 8
_BIAS_ALIGNMENT = 16


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run attention with the kernel that the GPU would choose."""
    if _flash_applies(query, key, value, attn_mask, enable_gqa):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if _efficient_applies(query, key, value, attn_mask):
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    formula: torch.Tensor = aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return formula


def _flash_applies(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    enable_gqa: bool,
) -> bool:
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and attn_mask is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.dim() == key.dim() == value.dim() == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
        and (enable_gqa or query.shape[1] == key.shape[1])
        and key.shape[1] == value.shape[1]
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= _LARGEST_FLASH_HEAD
        and min(query.numel(), key.numel()) > 0
    )


def _efficient_applies(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
) -> bool:
    alignment = 16 // query.element_size()
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and query.dim() == key.dim() == value.dim() == 4
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % alignment == 0
        and value.shape[-1] % alignment == 0
        and min(query.numel(), key.numel()) > 0
        and (attn_mask is None or not attn_mask.requires_grad or attn_mask.dim() in (2, 4))
    )


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    head = query.shape[-1]
    scale = head**-0.5 if scale is None else scale
    padding = -head % _FLASH_HEAD_MULTIPLE
    if padding:
        query, key, value = (F.pad(tensor, (0, padding)) for tensor in (query, key, value))
    output: torch.Tensor = aten._scaled_dot_product_flash_attention.default(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return output[..., :head] if padding else output


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    bias = None if attn_mask is None else _aligned_bias(attn_mask, query, key)
    needs_gradient = query.requires_grad or key.requires_grad or value.requires_grad
    output: torch.Tensor = aten._scaled_dot_product_efficient_attention.default(
        query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]
    return output


def _aligned_bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Turn a mask into an additive bias with rows padded to the kernel's alignment."""
    if mask.dtype is torch.bool:
        blocked = torch.full_like(mask, float("-inf"), dtype=query.dtype)
        mask = torch.where(mask, torch.zeros((), dtype=query.dtype), blocked)
    padding = -mask.shape[-1] % _BIAS_ALIGNMENT
    if padding:
        columns = mask.shape[-1]
        mask = F.pad(mask, (0, padding))[..., :columns]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
