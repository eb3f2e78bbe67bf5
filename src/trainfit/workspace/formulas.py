"""Workspaces of CUDA kernels, as formulas of the operator's signature.

Only what is known and large is here. Convolutions are not: cuDNN chooses an algorithm, and with it a
workspace, at run time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from trainfit.operators.recorded_calls import ITEM_BYTES
from trainfit.traces.trace import Signature

_FLASH_BLOCK = 128
_HEAD_BLOCK = 32


def cuda_workspace_bytes(signature: Signature) -> int | None:
    """Return the bytes that a CUDA kernel allocates inside itself; None where no formula is known."""
    formula = _FORMULAS.get(signature.name)
    return None if formula is None else formula(signature)


def _flash_backward(signature: Signature) -> int:
    """Flash attention sums the query's gradient in fp32, and keeps one fp32 value per row.

    Rows are padded to 128 and heads to 32 (Dao, FlashAttention-2, 2023). With grouped query heads the key
    and value gradients are first made for every query head, in the tensors' dtype.
    """
    query, key = signature.inputs[1], signature.inputs[2]
    batch, heads, rows, head = query.shape
    key_heads, columns = key.shape[1], key.shape[2]
    padded_rows = -(-rows // _FLASH_BLOCK) * _FLASH_BLOCK
    padded_head = -(-head // _HEAD_BLOCK) * _HEAD_BLOCK
    total = 4 * batch * heads * padded_rows * (padded_head + 1)
    if key_heads != heads:
        total += 2 * batch * heads * columns * head * ITEM_BYTES[key.dtype]
    return total


def _efficient_backward(signature: Signature) -> int:
    """The memory-efficient kernel keeps one fp32 value per row, and sums in fp32 for 16-bit dtypes."""
    query, key, value = signature.inputs[1], signature.inputs[2], signature.inputs[3]
    batch, heads, rows, _ = query.shape
    total = 4 * batch * heads * rows
    if query.dtype != "float32":
        total += 4 * sum(math.prod(spec.shape) for spec in (query, key, value))
    return total


def _embedding_backward(signature: Signature) -> int:
    """The indices are sorted with their positions: two sorted copies and the sort's own two."""
    return 4 * 8 * math.prod(signature.inputs[1].shape)


_FORMULAS: dict[str, Callable[[Signature], int]] = {
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward,
    "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
    "aten.embedding_dense_backward.default": _embedding_backward,
}
