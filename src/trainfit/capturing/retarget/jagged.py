"""Attention over jagged tensors: torch chooses its kernel in Python, and asks C++ what the GPU can run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.nested._internal.sdpa as jagged

from trainfit.capturing.replacing import replaced
from trainfit.capturing.retarget.attention import LOW, Attention, efficient_runs_on, flash_runs_on
from trainfit.capturing.retarget.gpu import Gpu


@contextlib.contextmanager
def jagged_attention_on(gpu: Gpu) -> Iterator[None]:
    """Answer which kernels the GPU can run; torch's own conditions on shapes still apply."""
    architecture = gpu.device.architecture

    def can_use_flash(params: Any, debug: bool = False) -> bool:
        low = params.query.dtype in LOW
        return params.attn_mask is None and low and flash_runs_on(architecture, _call(params))

    def can_use_efficient(params: Any, debug: bool = False) -> bool:
        return params.attn_mask is None and efficient_runs_on(architecture, _call(params))

    with (
        replaced(jagged, "can_use_flash_attention", lambda _: can_use_flash),
        replaced(jagged, "can_use_efficient_attention", lambda _: can_use_efficient),
        replaced(jagged, "can_use_cudnn_attention", lambda _: lambda params, debug=False: False),
    ):
        yield


def _call(params: Any) -> Attention:
    """Return what the choice depends on beside the mask."""
    return Attention(params.query, params.key, params.value, dropout_p=params.dropout)
