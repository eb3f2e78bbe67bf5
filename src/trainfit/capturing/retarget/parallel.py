"""`DataParallel` on the one GPU that there is: it divides a batch into one part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from trainfit.capturing.retarget.gpu import CUDA


@contextlib.contextmanager
def one_gpu_in_parallel() -> Iterator[None]:
    """Scatter to one GPU and gather from it; without CUDA, torch has no such functions."""
    missing = object()
    before = {name: getattr(torch._C, name, missing) for name in ("_scatter", "_gather")}
    for name, function in (("_scatter", _scatter), ("_gather", _gather)):
        setattr(torch._C, name, function)
    try:
        yield
    finally:
        for name, original in before.items():
            if original is missing:
                delattr(torch._C, name)
            else:
                setattr(torch._C, name, original)


def _scatter(tensor: torch.Tensor, devices: Any, chunk_sizes: Any, dim: int, streams: Any) -> Any:
    chunks = tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(chunk_sizes, dim)
    return tuple(chunk.to(CUDA) for chunk in chunks)


def _gather(tensors: Any, dim: int, destination: int | None) -> torch.Tensor:
    gathered = torch.cat(list(tensors), dim)
    return gathered.cpu() if destination == -1 else gathered
