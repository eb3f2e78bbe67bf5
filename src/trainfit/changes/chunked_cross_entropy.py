"""Cross-entropy of a linear layer's results, a part of the tokens at a time, with its gradients.

Each chunk's logits become the gradient of the loss in place, and that becomes the gradients of the hidden
states and of the weights, before the next chunk begins. Nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNKS = 16
"""How many: the logits that are there at a time are this part of all."""
_LEAST_TOKENS = 128
"""In a chunk: fewer would not fill a GPU."""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    computes_in: torch.dtype,
    dtype: torch.dtype,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """Return the loss of `hidden` (tokens, features) against `labels` (tokens).

    Products are computed in `computes_in`, the loss in `dtype`.
    """
    asked = (computes_in, dtype, ignore_index, reduction)
    function: Any = _ChunkedCrossEntropy.apply
    loss: Tensor = function(hidden, weight, bias, labels, asked)
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        asked: tuple[torch.dtype, torch.dtype, int, str],
    ) -> Tensor:
        computes_in, dtype, ignore_index, reduction = asked
        with torch.autocast(hidden.device.type, enabled=False):
            rows, columns = hidden.to(computes_in), weight.to(computes_in)
            counted = labels != ignore_index
            scale = 1.0 / counted.sum().to(dtype) if reduction == "mean" else None
            of_hidden = torch.empty_like(rows)
            of_weight = torch.zeros_like(columns) if weight.requires_grad else None
            of_bias = torch.zeros_like(bias) if bias is not None and bias.requires_grad else None
            losses = []
            size = max(-(-len(rows) // _CHUNKS), _LEAST_TOKENS)
            for first in range(0, len(rows), size):
                part = slice(first, first + size)
                loss, gradient = _loss_and_gradient(
                    rows[part], columns, bias, labels[part], counted[part], dtype
                )
                if scale is not None:
                    gradient *= scale
                losses.append(loss)
                if of_bias is not None:
                    of_bias += gradient.sum(0).to(of_bias.dtype)
                gradient = gradient.to(computes_in)
                torch.mm(gradient, columns, out=of_hidden[part])
                if of_weight is not None:
                    of_weight.addmm_(gradient.t(), rows[part])
            total = torch.stack(losses).sum()
            total = total if scale is None else total * scale
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (of_loss,) = gradients
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        scaled = [
            None if found is None else (found * of_loss.to(found.dtype)).to(dtype)
            for found, dtype in ((of_hidden, hidden_dtype), (of_weight, weight_dtype))
        ]
        of_bias = None if of_bias is None else of_bias * of_loss.to(of_bias.dtype)
        return *scaled, of_bias, None, None


def _loss_and_gradient(
    rows: Tensor, columns: Tensor, bias: Tensor | None, labels: Tensor, counted: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sum of a chunk's losses and its gradient in the logits, over the memory of the logits."""
    logits = torch.nn.functional.linear(rows, columns, None if bias is None else bias.to(rows.dtype))
    logits = logits.to(dtype)
    of_label = torch.where(counted, labels, 0).unsqueeze(1)
    logits -= logits.amax(1, keepdim=True)
    right = logits.gather(1, of_label).squeeze(1)
    logits.exp_()
    sums = logits.sum(1, keepdim=True)
    loss = torch.where(counted, sums.squeeze(1).log() - right, 0.0).sum()
    logits /= sums
    logits.scatter_add_(1, of_label, torch.full_like(of_label, -1, dtype=dtype))
    logits *= counted.unsqueeze(1)
    return loss, logits
