"""What older versions of torch kept for backward, and newer ones do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


class LogSoftmaxWithInput(torch.autograd.Function):
    """Log softmax over dimension 1, up to torch 1.10: its input was kept beside its result, for its dtype."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        """Keep input and result."""
        result = aten._log_softmax.default(scores, 1, False)
        ctx.save_for_backward(scores, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """As torch computes it."""
        scores, result = ctx.saved_tensors
        made: Tensor = aten._log_softmax_backward_data.default(gradient, result, 1, scores.dtype)
        return made


class SoftmaxWithInput(torch.autograd.Function):
    """Softmax over the last dimension, up to torch 1.10: likewise."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        """Keep input and result."""
        result = aten._softmax.default(scores, -1, False)
        ctx.save_for_backward(scores, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """As torch computes it."""
        scores, result = ctx.saved_tensors
        made: Tensor = aten._softmax_backward_data.default(gradient, result, -1, scores.dtype)
        return made
