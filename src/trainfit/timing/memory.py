"""Memory for the inputs of operators, and ways to have it near, in the last cache, or far away.

Float inputs are cut out of large blocks of random numbers. A far input is the piece of its block that was
used longest ago: by the time the cutting comes round again, more bytes have gone by than the caches hold.
What has to be near is touched directly before the call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from trainfit.timing.locality import Caches

_ALIGNMENT = 64
_LEAST_FLOAT = 0.01
_PIECE_ELEMENTS = 1 << 20
_FAR = 1.5
"""The length of a round through a block, as a multiple of the last cache."""


class Memory:
    """Blocks of random floats by dtype, kept while measuring, and results that are kept for a while."""

    def __init__(self, device: str, caches: Caches) -> None:
        """Allocate nothing yet but what flushes a core's own cache."""
        self.device = device
        self.caches = caches
        self.far_bytes = int(_FAR * caches.last_bytes)
        self._blocks: dict[torch.dtype, _Block] = {}
        self._results: deque[tuple[Any, int]] = deque()
        self._kept_bytes = 0
        self._flusher = torch.zeros(2 * caches.own_bytes, dtype=torch.uint8, device=device)

    def reserve(self, dtype: torch.dtype, extents: Iterable[int]) -> None:
        """Make room for a call with inputs of these sizes, in elements, all at once."""
        elements = sum(aligned(extent, dtype) for extent in extents)
        block = self._blocks.get(dtype)
        if block is None or block.room < elements:
            # The old block is freed before the new one is allocated.
            self._blocks.pop(dtype, None)
            self._blocks[dtype] = _Block(dtype, elements, self.far_bytes, self.device)

    def cut(self, dtype: torch.dtype, elements: int) -> torch.Tensor:
        """Return the random floats of this dtype that were used longest ago."""
        return self._blocks[dtype].cut(elements)

    def renew(self, piece: torch.Tensor) -> None:
        """Overwrite a piece, whose values an operator has changed, with random floats."""
        self._blocks[piece.dtype].fill(piece)

    def keep(self, result: Any, nbytes: int) -> None:
        """Keep a result until enough others have followed that its memory is far away when it is freed."""
        self._results.append((result, nbytes))
        self._kept_bytes += nbytes
        while self._kept_bytes > self.far_bytes:
            self._kept_bytes -= self._results.popleft()[1]

    def let_go(self) -> None:
        """Free the results that were kept."""
        self._results.clear()
        self._kept_bytes = 0

    def free_warm(self, sizes: Iterable[int]) -> None:
        """Touch memory of these sizes and free it, such that the next to ask for it gets it warm."""
        taken = [torch.zeros(size, dtype=torch.uint8, device=self.device) for size in sizes]
        while taken:
            taken.pop()

    def flush_own_cache(self) -> None:
        """Push everything out of the core's own cache, but not out of the last one."""
        touch(self._flusher)


class _Block:
    """Random floats of one dtype, cut from front to back and from the front again."""

    def __init__(self, dtype: torch.dtype, elements: int, far_bytes: int, device: str) -> None:
        self.room = elements
        real = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
        drawn = torch.empty(_PIECE_ELEMENTS, dtype=real)
        drawn.uniform_(_LEAST_FLOAT, 1, generator=torch.Generator().manual_seed(0))
        self._piece = drawn.to(device=device, dtype=dtype)
        self._all = torch.empty(elements + far_bytes // dtype.itemsize, dtype=dtype, device=device)
        self.fill(self._all)
        self._next = 0

    def cut(self, elements: int) -> torch.Tensor:
        if self._next + elements > self._all.numel():
            self._next = 0
        begin = self._next
        self._next += aligned(elements, self._all.dtype)
        return self._all[begin : begin + elements]

    def fill(self, tensor: torch.Tensor) -> None:
        # Copies of one piece: drawing all numbers would take longer than the measurements.
        for part in tensor.split(self._piece.numel()):
            part.copy_(self._piece[: part.numel()])


def aligned(elements: int, dtype: torch.dtype) -> int:
    """Round up to where the allocator would begin the next tensor."""
    step = _ALIGNMENT // dtype.itemsize
    return -(-elements // step) * step


def touch(tensor: torch.Tensor) -> None:
    """Read and write a contiguous tensor without changing it."""
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    torch.add(tensor, 0, out=tensor)
