"""One chunk of a tensor without all the others: FSDP2 makes one view per rank, and uses two of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param

from trainfit.capturing.replacing import replaced


class Chunks(Sequence[torch.Tensor]):
    """What `torch.chunk` returns, and empty tensors for the ranks that get none; each made when asked for."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        """Divide `tensor` along `dim`."""
        self._tensor, self._count, self._dim = tensor, count, dim
        self._length = -(-tensor.shape[dim] // count)

    def __len__(self) -> int:
        """How many chunks there are."""
        return self._count

    @overload
    def __getitem__(self, number: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, number: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, number: int | slice) -> torch.Tensor | list[torch.Tensor]:
        """Return one chunk, or several."""
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(self._count))]
        place = range(self._count)[number]
        begin = place * self._length
        left = self._tensor.shape[self._dim] - begin
        if left <= 0 and place > 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, min(self._length, max(left, 0)))


@contextlib.contextmanager
def without_work_per_rank() -> Iterator[None]:
    """Let FSDP2 divide parameters between any number of ranks at the same cost."""
    with replaced(_fsdp_param, "_chunk_with_empty", lambda o: lambda t, n, dim: Chunks(t, n, dim)):
        yield
