"""Hollow tensors: ordinary CPU tensors whose storage has a size and an address, but no memory behind it.

A fake tensor is a tensor *subclass*, and code can tell: optimizers check `type(p)`, autograd refuses to
accumulate in place, models ask "is this tracing?" and take another path. A hollow tensor is a plain
`torch.Tensor` (or `nn.Parameter`) in every respect; only its bytes are missing. Nothing that looks at it
can see a difference, so nothing behaves differently.

The addresses lie in one reserved range of virtual memory that is never written: a stray read (printing a
tensor, say) sees zeros instead of crashing.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import torch

_CPU = torch.device("cpu")
_ALIGNMENT = 64
_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
_NOTHING = torch.empty(0)
_construct_storage: Any = torch._C._construct_storage_from_data_pointer


class AddressSpace:
    """Hands out distinct addresses in a reserved, never touched range of virtual memory."""

    def __init__(self) -> None:
        """Reserve as much as the system lets us; less only means that addresses repeat sooner."""
        for terabytes in (32, 8, 1, 1 / 16, 1 / 256):
            try:
                self._range = mmap.mmap(-1, int(terabytes * 2**40), flags=_RESERVE)
                break
            except (OSError, ValueError, OverflowError):
                continue
        else:
            raise MemoryError("cannot reserve 4 GiB of virtual address space for capture")
        self._size = len(self._range)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._range))
        self._next = 0

    def take(self, nbytes: int) -> int:
        """Return an address for `nbytes`; addresses start over when the range is used up."""
        if self._next + nbytes > self._size:
            self._next = 0
        address = self._base + self._next
        self._next += (nbytes + _ALIGNMENT) & -_ALIGNMENT
        return address

    def contains(self, address: int) -> bool:
        """Return whether an address lies in the range."""
        return self._base <= address < self._base + self._size


_spaces: dict[str, AddressSpace] = {}


def _storage_in(space: str, nbytes: int, device: torch.device) -> torch.UntypedStorage:
    if space not in _spaces:
        _spaces[space] = AddressSpace()
    storage: torch.UntypedStorage = _construct_storage(_spaces[space].take(nbytes), device, nbytes)
    return storage


def hollow_storage(nbytes: int) -> torch.UntypedStorage:
    """Return a CPU storage of `nbytes` with no memory behind it."""
    return _storage_in("hollow", nbytes, _CPU)


def absent_storage(nbytes: int, device: torch.device = _CPU) -> torch.UntypedStorage:
    """Return a storage for what is never computed and never read: in a capture it counts as no memory, too.

    A GPU that read it would stop with an illegal address rather than compute with what it finds there.
    """
    return _storage_in("absent", nbytes, device)


def is_absent(storage: torch.UntypedStorage | torch.Tensor) -> bool:
    """Return whether the storage, or that of the tensor, was made by `absent_storage`."""
    return "absent" in _spaces and _spaces["absent"].contains(storage.data_ptr())


def storage_over(backing: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a second storage object over the memory of `backing`, which the caller keeps alive."""
    storage: torch.UntypedStorage = _construct_storage(backing.data_ptr(), _CPU, backing.nbytes())
    return storage


def tensor_over(
    storage: torch.UntypedStorage, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """Return a plain tensor that lays `size` and `stride` over `storage`."""
    return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)


def write_counter(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without memory whose `_version` torch counts together with that of `tensor`.

    The counter belongs to a tensor, its views and its detached tensors (but not to `.data`), and goes on when
    `tensor` itself is freed. A detached tensor shares it; without its data, nothing else is left of it.
    """
    with torch._C._DisableTorchDispatch():
        counter = tensor.detach()
        counter.data = _NOTHING
    return counter
