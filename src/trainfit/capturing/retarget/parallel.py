"""`DataParallel` on the one GPU that there is: it divides a batch into one part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from trainfit.capturing.own_gpu import own_device
from trainfit.capturing.replacing import replaced


@contextlib.contextmanager
def one_gpu_in_parallel() -> Iterator[None]:
    """Scatter to one GPU and gather from it; without CUDA, torch has no such functions, and no streams."""
    scatter = torch.nn.parallel._functions.Scatter
    with (
        replaced(torch._C, "_scatter", lambda _: _scatter, may_be_missing=True),
        replaced(torch._C, "_gather", lambda _: _gather, may_be_missing=True),
        replaced(scatter, "forward", lambda _: _scatter_without_streams),
    ):
        yield


def _scatter_without_streams(ctx: Any, devices: Any, chunk_sizes: Any, dim: int, tensor: torch.Tensor) -> Any:
    """Do what `Scatter.forward` does; it copies from the host in streams, which ask for a real GPU."""
    ctx.dim = dim
    ctx.input_device = tensor.get_device() if tensor.device.type != "cpu" else -1
    return _scatter(tensor, devices, chunk_sizes, dim, None)


def _scatter(tensor: torch.Tensor, devices: Any, chunk_sizes: Any, dim: int, streams: Any) -> Any:
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(chunk_sizes, dim)
    return tuple(chunk.to(own_device()) for chunk in chunks)


def _gather(tensors: Any, dim: int, destination: int | None) -> torch.Tensor:
    gathered = torch.cat(list(tensors), dim)
    return gathered.cpu() if destination == -1 else gathered
