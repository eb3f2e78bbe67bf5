"""The memory of tensors as numpy arrays, and sums over ranks on them: nothing here allocates through torch.

No operator of torch is called: neither the profiler nor a dispatch mode of the step may see the exchange.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import ReduceOp

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""A type of numpy for elements of so many bytes, to move them."""
_NUMBERS = {
    torch.float64: "f8", torch.float32: "f4", torch.float16: "f2", torch.bfloat16: "u2",
    torch.int64: "i8", torch.int32: "i4", torch.int16: "i2", torch.int8: "i1", torch.uint8: "u1",
    torch.bool: "?", torch.complex64: "c8", torch.complex128: "c16",
}  # fmt: skip
"""The type of numpy in which elements are added; bfloat16, which numpy does not know, by its bits."""
_BINARY: dict[Any, Callable[..., Array]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


@dataclass(frozen=True)
class ExchangedPart:
    """A tensor or a part of it: its memory as words of its element size, in the tensor's own layout."""

    tensor: torch.Tensor
    """The whole of it."""
    words: Array

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor's elements."""
        return self.tensor.dtype

    def read(self) -> Bytes:
        """Return the elements in order, as bytes: the memory itself where that is in order."""
        return np.ascontiguousarray(self.words).reshape(-1).view(np.uint8)

    def write(self, content: Bytes) -> None:
        """Put elements there, in order."""
        if content.nbytes != self.words.nbytes:
            raise RuntimeError(
                f"a rank has sent {content.nbytes:,} bytes where this one expects {self.words.nbytes:,}: all "
                "ranks have to exchange tensors of the same shape and dtype."
            )
        self.words[...] = content.view(self.words.dtype).reshape(self.words.shape)


def whole(tensor: torch.Tensor) -> ExchangedPart:
    """Return all of a tensor."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            "sparse tensors cannot be exchanged while ranks are measured: use dense gradients."
        )
    size = tensor.element_size()
    if tensor.numel() == 0:
        return ExchangedPart(tensor, np.empty(tuple(tensor.shape), dtype=_WORDS[size]))
    span = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
    memory: Any = (ctypes.c_char * (span * size)).from_address(tensor.data_ptr())
    memory.owner = tensor  # arrays keep what they are made of, and with it the tensor
    strides = tuple(stride * size for stride in tensor.stride())
    words: Array = np.ndarray(tuple(tensor.shape), dtype=_WORDS[size], buffer=memory, strides=strides)
    return ExchangedPart(tensor, words)


def wholes(tensors: Sequence[torch.Tensor]) -> list[ExchangedPart]:
    """Return all of several tensors."""
    if isinstance(tensors, torch.Tensor):
        raise NotImplementedError(
            "a method of a process group was called with a tensor in place of a list: call the function of "
            "torch.distributed instead, such as all_reduce(tensor, group=group)."
        )
    return [whole(tensor) for tensor in tensors]


def parts_of(tensor: torch.Tensor, count: int, sizes: Sequence[int] = ()) -> list[ExchangedPart]:
    """Return parts of a tensor, one per rank: by sizes along its first dimension, else even ones."""
    words = whole(tensor).words
    if sizes:
        ends = np.cumsum(sizes).tolist()
        return [ExchangedPart(tensor, words[end - size : end]) for size, end in zip(sizes, ends)]
    if not tensor.is_contiguous() or tensor.numel() % count:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} cannot be divided evenly among {count} ranks: it has "
            "to be contiguous, and as long as all parts together."
        )
    return [ExchangedPart(tensor, words) for words in words.reshape(count, -1)]


def joined(parts: Sequence[ExchangedPart]) -> Bytes:
    """Return the elements of all parts, one part after the other."""
    return parts[0].read() if len(parts) == 1 else np.concatenate([part.read() for part in parts])


def write_all(parts: Sequence[ExchangedPart], content: Bytes) -> None:
    """Put the elements of all parts there, one part after the other."""
    for part, piece in zip(parts, divided(content, parts)):
        part.write(piece)


def divided(content: Bytes, parts: Sequence[ExchangedPart]) -> list[Bytes]:
    """Return the bytes of each part out of those of all."""
    if len(parts) == 1:
        return [content]
    return np.split(content, np.cumsum([part.words.nbytes for part in parts])[:-1])


def reduced(parts: Sequence[Bytes], dtype: torch.dtype, operation: Any) -> Bytes:
    """Return the sum (or whatever the operation is) of the contributions, in the order in which they come."""
    function = next((found for known, found in _BINARY.items() if operation == known), None)
    if function is None:
        raise NotImplementedError(f"{operation} cannot be computed while ranks are measured on a CPU.")
    if dtype not in _NUMBERS:
        raise NotImplementedError(f"{dtype} cannot be added up between ranks on a CPU.")
    brain = dtype is torch.bfloat16
    total = np.array(parts[0]).view(_NUMBERS[dtype])
    with np.errstate(all="ignore"):  # as quiet as torch
        for part in parts[1:]:
            other = part.view(_NUMBERS[dtype])
            total = _rounded(function(_widened(total), _widened(other))) if brain else function(total, other)
        if operation == ReduceOp.AVG:
            total = _averaged(total, len(parts), brain)
    return np.ascontiguousarray(total, dtype=_NUMBERS[dtype]).view(np.uint8)


def _averaged(total: Array, count: int, brain: bool) -> Array:
    if brain:
        return _rounded(_widened(total) / np.float32(count))
    return total // count if total.dtype.kind in "iu" else total / total.dtype.type(count)


def _widened(brain: Array) -> Array:
    """Return bfloat16 numbers, given by their bits, in float32."""
    return (brain.astype(np.uint32) << 16).view(np.float32)


def _rounded(wide: Array) -> Array:
    """Return the bits of the nearest bfloat16 numbers, of two that are as near the even one."""
    bits = np.ascontiguousarray(wide, dtype=np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), nearest)
