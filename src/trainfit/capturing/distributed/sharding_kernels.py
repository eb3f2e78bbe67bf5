"""FSDP2's own operators: what they do is a few operators of torch, which are recorded in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

if TYPE_CHECKING:
    from trainfit.capturing.dispatch import CaptureMode

_fsdp = torch.ops.fsdp


def _as(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(mode: CaptureMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mode:
            return function(*args, **kwargs)

    return call


SHARDING_HANDLERS: dict[OpOverload, Callable[..., Any]] = {
    _fsdp.all_gather_copy_in.default: _as(_fsdp_collectives.all_gather_copy_in_cuda),
    _fsdp.split_with_sizes_copy.default: _as(_fsdp_collectives.split_with_sizes_copy),
    _fsdp.chunk_cat.default: _as(_fsdp_collectives.chunk_cat),
}
