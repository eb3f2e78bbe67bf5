"""Attention over jagged tensors: torch chooses its kernel in Python, and asks C++ what the GPU can run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
        call = _call(params)
        return call.mask is None and call.query.dtype in LOW and flash_runs_on(architecture, call)

    def can_use_efficient(params: Any, debug: bool = False) -> bool:
        call = _call(params)
        return call.mask is None and efficient_runs_on(architecture, call)

    with (
        replaced(jagged, "can_use_flash_attention", _constantly(can_use_flash)),
        replaced(jagged, "can_use_efficient_attention", _constantly(can_use_efficient)),
        replaced(jagged, "can_use_cudnn_attention", _constantly(lambda params, debug=False: False)),
    ):
        yield


def _constantly(answer: Callable[..., bool]) -> Callable[[Any], Callable[..., bool]]:
    return lambda original: answer


def _call(params: Any) -> Attention:
    return Attention(
        params.query,
        params.key,
        params.value,
        params.attn_mask,
        params.dropout > 0,
        params.is_causal,
        params.enable_gqa,
    )
