"""Read the arguments of a recorded call by position or name, and the sizes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainfit.traces import arguments
from trainfit.traces.trace import Signature, TensorSpec

ITEM_BYTES = dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8)
ITEM_BYTES |= dict.fromkeys(("float32", "int32", "uint32"), 4)
ITEM_BYTES |= dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2)
ITEM_BYTES["complex128"] = 16
"""Bytes per element; whatever is not here (bool, int8, float8) takes one."""


class RecordedArguments:
    """The decoded arguments of a signature; tensors are their `TensorSpec`."""

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._positional, self._keyword = arguments.decode(signature.arguments)

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument that may be given by position or by name."""
        if position < len(self._positional):
            return self._decode(self._positional[position])
        return self._decode(self._keyword.get(name, default))

    def tensor(self, position: int, name: str = "") -> TensorSpec | None:
        """Return a tensor argument's metadata, or None if there is none at this place."""
        value = self.get(position, name)
        return value if isinstance(value, TensorSpec) else None

    def _decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._decode(item) for item in value]
        if isinstance(value, dict) and "tensor" in value:
            return self._signature.inputs[value["tensor"]]
        return value


def elements(spec: TensorSpec) -> int:
    """Return the number of elements."""
    return math.prod(spec.shape)


def nbytes(spec: TensorSpec) -> int:
    """Return the bytes that reading every element touches; an expanded dimension is the same memory."""
    strides = spec.stride if len(spec.stride) == len(spec.shape) else (1,) * len(spec.shape)
    distinct = math.prod(length for length, stride in zip(spec.shape, strides) if stride != 0 or length == 0)
    return distinct * ITEM_BYTES.get(spec.dtype, 1)


_USUAL_TENSORS = 6
"""What an operator takes that does not take lists."""


def tensors_of(signatures: Sequence[Signature]) -> list[int]:
    """Return for each signature how many tensors it takes beyond those that every operator takes."""
    return [max(len(signature.inputs) - _USUAL_TENSORS, 0) for signature in signatures]


def filled_shares(signatures: Sequence[Signature], cache_bytes: int) -> list[float]:
    """Return for each signature how much of a core's own cache its tensors fill: 1 is all of it."""
    return [
        min(sum(map(nbytes, (*signature.inputs, *signature.outputs))) / cache_bytes, 1.0)
        if cache_bytes and not signature.view
        else 0.0
        for signature in signatures
    ]
