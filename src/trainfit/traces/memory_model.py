"""What the bytes that a program asks for become on a device: exactly these on a CPU, whole blocks on a GPU.

What a caching allocator reserves beyond that depends on the order of allocations and frees (`Trace.events`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """A device hands out memory in multiples of `block_bytes`."""

    block_bytes: int = 1

    def occupied(self, asked_bytes: int) -> int:
        """Return what an allocation of `asked_bytes` takes."""
        return -(-asked_bytes // self.block_bytes) * self.block_bytes


EXACT = MemoryModel()
CUDA_BLOCKS = MemoryModel(512)
"""torch's CUDA allocator rounds every request up to a multiple of 512 bytes."""


def memory_model(device_kind: str) -> MemoryModel:
    """Return the model of a kind of device, `cpu` or `cuda`."""
    return CUDA_BLOCKS if device_kind == "cuda" else EXACT
