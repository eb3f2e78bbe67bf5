"""Memory of the host, for what a device has no room for.

For a GPU it is pinned, so that copies run beside the program. On a CPU it is memory that torch's allocator
does not own: neither a capture nor the profiler counts it, as if there were a second device.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)


def host_like(tensor: Tensor) -> Tensor:
    """Return memory of the host for the values of a tensor, laid out as they are; not written yet."""
    size, dtype = tensor.shape, tensor.dtype
    stride = torch.empty_like(tensor, device="meta").stride()  # without gaps
    if tensor.is_cuda:
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu", pin_memory=True)
    if tensor.numel() == 0:
        return torch.empty_strided(size, stride, dtype=dtype)
    pages = mmap.mmap(-1, tensor.numel() * tensor.element_size(), flags=_PRIVATE)
    return torch.frombuffer(pages, dtype=dtype).as_strided(size, stride)


def to_host(tensor: Tensor, home: Tensor | None = None) -> Tensor:
    """Return the values of a tensor in the host's memory: in `home`, if there is one that they fit into.

    For a GPU they are there when the stream is done with it; `arrived` waits for that.
    """
    if home is None or home.shape != tensor.shape or home.dtype != tensor.dtype:
        home = host_like(tensor)
    home.copy_(tensor, non_blocking=True)
    return home


def to_device(home: Tensor, device: torch.device) -> Tensor:
    """Return a copy of the host's values in new memory of the device."""
    tensor = torch.empty_like(home, device=device)
    tensor.copy_(home, non_blocking=True)
    return tensor


def arrived(device: torch.device) -> None:
    """Wait until the host has what was copied to it, so that any code may read it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
