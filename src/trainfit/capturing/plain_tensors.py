"""The plain tensors that a tensor consists of: sparse tensors and tensor subclasses are flattened."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def strided_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors with storages that a tensor consists of: itself, or its flattened parts."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from strided_parts(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout is torch.strided and not tensor.is_meta:
        yield tensor
