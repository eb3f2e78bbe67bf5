"""Compare what two runs made, bit by bit: tensors, numbers, and whatever contains them.

A value is taken apart first (`contents_of`): every number, text and tensor in it gets a name such as
`result['loss']`, and containers are remembered by their type. Then the parts are compared by name
(`compare`). Bits decide: 0.0 is not -0.0, and float32 is not float64. Only NaN has many bit patterns for one
thing: NaN equals NaN, and nothing else. What cannot be taken apart, such as an object of an unknown class, is
not called equal: it is listed as not compared.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_DEEPEST = 200
_PLAIN = (
    *(bool, int, float, complex, str, bytes, NoneType, enum.Enum, range, slice, type),
    *(torch.dtype, torch.device, torch.layout),
)
"""Types whose values say everything: they are compared as they are."""
_PADDED = "gG"
"""NumPy's long doubles: some of their bits mean nothing."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class _Kind:
    """What a container or a tensor with parts is; its parts have names of their own."""

    text: str


@dataclass(frozen=True)
class _Unknown:
    """Something that cannot be taken apart."""

    text: str


Contents = dict[str, Any]
"""The parts of a value by name: tensors, arrays and plain values, and what their containers are."""


@dataclass(frozen=True)
class Match:
    """How two values compare."""

    compared: int
    """How many tensors, numbers and texts were compared."""
    differences: tuple[str, ...]
    """One line for each part that is not the same."""
    not_compared: tuple[str, ...]
    """One line for each part that cannot be compared."""
    largest_difference: float
    """Between any two numbers; infinite where no number says it: NaN against a number, another shape, a part
    that only one of the two has."""

    @property
    def equal(self) -> bool | None:
        """Whether everything that was compared is the same, bit by bit; None if nothing was."""
        if self.differences:
            return False
        return True if self.compared else None


def contents_of(value: Any, name: str = "result", *, copies: bool = True) -> Contents:
    """Take a value apart; without `copies`, nothing may write to its tensors until they are compared."""
    found: Contents = {}
    for path, part in _parts(value, name, ()):
        if copies and isinstance(part, torch.Tensor):
            part = part.clone()
        elif copies and isinstance(part, numpy.ndarray):
            part = part.copy()
        found[path] = part
    return found


def compare(first: Contents, second: Contents, names: tuple[str, str] = ("first", "second")) -> Match:
    """Compare two values part by part; `names` say in the differences which of the two is which."""
    compared, differences, not_compared, largest = 0, [], [], 0.0
    for path in dict.fromkeys((*first, *second)):
        if path not in first or path not in second:
            differences.append(f"{path}: only in the {names[0] if path in first else names[1]} run")
            largest = math.inf
            continue
        one, other = first[path], second[path]
        if isinstance(one, _Unknown) and isinstance(other, _Unknown):
            not_compared.append(f"{path} ({one.text})")
            continue
        compared += not isinstance(one, _Kind | NoneType)
        found = _difference(one, other)
        if found is not None:
            differences.append(f"{path}: {found.text}")
            largest = max(largest, found.size)
    return Match(compared, tuple(differences), tuple(not_compared), largest)


def largest_element(contents: Contents) -> float:
    """Return the largest finite magnitude among all tensors, to compare a difference with."""
    largest = 0.0
    for part in contents.values():
        if isinstance(part, torch.Tensor) and part.numel():
            numbers = part.abs() if part.is_complex() else part.to(torch.float64).abs()
            largest = max(largest, float(torch.nan_to_num(numbers, nan=0.0, posinf=0.0).max()))
    return largest


def _parts(value: Any, path: str, ancestors: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value with their names; `ancestors` are the containers around it."""
    if isinstance(value, torch.Tensor):
        yield from _tensor_parts(value.detach(), path)
    elif isinstance(value, numpy.ndarray | numpy.generic):
        yield from _array_parts(numpy.asarray(value), path, ancestors)
    elif isinstance(value, _PLAIN):
        yield path, value
    elif id(value) in ancestors:
        yield path, _Kind(f"the container {len(ancestors) - ancestors.index(id(value))} levels up")
    elif len(ancestors) > _DEEPEST:
        yield path, _Unknown(f"more than {_DEEPEST} levels deep")
    else:
        inside = _inside(value)
        if inside is None:
            yield path, _Unknown(_type_name(value))
            return
        yield path, _Kind(_type_name(value))
        for name, part in inside:
            yield from _parts(part, path + name, (*ancestors, id(value)))


def _inside(value: Any) -> list[tuple[str, Any]] | None:
    """Return what a container holds, by name; None if it is no container that is known."""
    if isinstance(value, Mapping):
        return [_entry(number, key, held) for number, (key, held) in enumerate(value.items())]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{field}", part) for field, part in zip(value._fields, value)]
    if isinstance(value, list | tuple | deque):
        return [(f"[{number}]", part) for number, part in enumerate(value)]
    if isinstance(value, set | frozenset):
        # They have no order; what is no plain value has no name by which it could be found in the other set.
        unknown = _Unknown("a member of a set")
        return [(f"{{{part!r}}}", part if isinstance(part, _PLAIN) else unknown) for part in value]
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
        return [(f".{field}", getattr(value, field)) for field in fields if hasattr(value, field)]
    if isinstance(value, SimpleNamespace):
        return [(f".{field}", part) for field, part in vars(value).items()]
    return None


def _entry(number: int, key: Any, value: Any) -> tuple[str, Any]:
    """Name an entry of a mapping by its key, or by its place if the key has no value of its own."""
    parts = key if isinstance(key, tuple) else (key,)
    plain = all(isinstance(part, _PLAIN) for part in parts)
    return (f"[{key!r}]" if plain else f"[entry {number}]"), value


def _type_name(value: Any) -> str:
    # By name: a class that is defined inside `build` is another class in each run.
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _tensor_parts(tensor: torch.Tensor, path: str) -> Iterator[tuple[str, Any]]:
    """Yield a tensor, or its parts if its elements do not lie in one block of memory."""
    inner = _inner_tensors(tensor)
    if inner is None:
        plain = tensor.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        yield path, _Unknown("a tensor without memory") if plain.is_meta else plain
        return
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = str(tensor.layout).removeprefix("torch.")
    nested = "nested " if tensor.is_nested else ""
    yield path, _Kind(f"{nested}{layout} {dtype} of shape {_shape_of(tensor)}")
    for name, part in inner:
        yield from _tensor_parts(part.detach(), path + name)


def _shape_of(tensor: torch.Tensor) -> str:
    return "ragged" if tensor.is_nested else str(list(tensor.shape))


def _inner_tensors(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]] | None:
    if is_traceable_wrapper_subclass(tensor):
        return [(f".{name}", getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
    if tensor.is_nested:
        return [(f"[{number}]", part) for number, part in enumerate(tensor.unbind())]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [(".indices", tensor.indices()), (".values", tensor.values())]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        compressed = tensor.crow_indices(), tensor.col_indices()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        compressed = tensor.ccol_indices(), tensor.row_indices()
    elif tensor.layout is not torch.strided:
        return [(".dense", tensor.to_dense())]
    elif tensor.is_quantized:
        return [(".dequantized", tensor.dequantize())]
    else:
        return None
    return [(".pointers", compressed[0]), (".indices", compressed[1]), (".values", tensor.values())]


def _array_parts(array: Any, path: str, ancestors: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yield a NumPy array, or its fields or objects if it has such."""
    if array.dtype.names:
        yield path, _Kind(f"array of {array.dtype} and shape {list(array.shape)}")
        for name in array.dtype.names:
            yield from _array_parts(array[name], f"{path}[{name!r}]", ancestors)
    elif array.dtype.hasobject:
        yield path, _Kind(f"array of objects and shape {list(array.shape)}")
        for number, part in enumerate(array.flat):
            yield from _parts(part, f"{path}.flat[{number}]", (*ancestors, id(array)))
    elif array.dtype.char in _PADDED:
        yield path, _Unknown(f"array of {array.dtype}")
    else:
        yield path, array


@dataclass(frozen=True)
class _Difference:
    text: str
    size: float = math.inf


def _difference(one: Any, other: Any) -> _Difference | None:
    """Return what is different between two parts of the same name; None if nothing is."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _tensor_difference(one, other)
    if isinstance(one, numpy.ndarray) and isinstance(other, numpy.ndarray):
        return _array_difference(one, other)
    kinds = [part.text if isinstance(part, _Kind | _Unknown) else _type_name(part) for part in (one, other)]
    if kinds[0] != kinds[1]:
        return _Difference(f"{kinds[0]} and {kinds[1]}")
    if isinstance(one, float | complex):
        same = all(map(_same_bits, *((part.real, part.imag) for part in map(complex, (one, other)))))
        size = abs(one - other)
        return None if same else _Difference(f"{one!r} and {other!r}", math.inf if math.isnan(size) else size)
    if isinstance(one, enum.Enum):
        # A class that is defined inside `build` has other members in each run.
        one, other = one.name, other.name
    if isinstance(one, type):
        one, other = (f"{part.__module__}.{part.__qualname__}" for part in (one, other))
    if one == other:
        return None
    is_number = isinstance(one, int) and not isinstance(one, bool)
    return _Difference(f"{one!r:.60} and {other!r:.60}", _apart(one, other) if is_number else math.inf)


def _apart(one: int, other: int) -> float:
    try:
        return float(abs(one - other))
    except OverflowError:
        return math.inf


def _same_bits(one: float, other: float) -> bool:
    return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))


def _array_difference(one: Any, other: Any) -> _Difference | None:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return _Difference(f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}")
    try:
        tensors = [
            torch.from_numpy(numpy.ascontiguousarray(part)).reshape(part.shape) for part in (one, other)
        ]
    except (TypeError, ValueError):
        # Texts, times and numbers that torch does not have: the bytes say it all.
        return (
            None
            if one.tobytes() == other.tobytes()
            else _Difference(f"arrays of {one.dtype} are not the same")
        )
    return _tensor_difference(*tensors)


def _tensor_difference(one: torch.Tensor, other: torch.Tensor) -> _Difference | None:
    kinds = [
        f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)} on {part.device}"
        for part in (one, other)
    ]
    if kinds[0] != kinds[1]:
        return _Difference(f"{kinds[0]} and {kinds[1]}")
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    different = _bits(one) != _bits(other)
    if not different.any():
        return None
    numbers = [part[different].to(torch.float64) for part in (one, other)]
    both_nan = numbers[0].isnan() & numbers[1].isnan()
    if both_nan.all():
        return None
    count, first = int((~both_nan).sum()), int((~both_nan).nonzero()[0])
    apart = (numbers[0] - numbers[1]).abs()[~both_nan]
    size = math.inf if apart.isnan().any() else float(apart.max())
    where = different.nonzero()[first].tolist()
    values = " and ".join(f"{float(part[first])!r}" for part in numbers)
    of_all = f"{count:,} of {one.numel():,} elements, the first at {where}: " if one.dim() else ""
    return _Difference(f"{of_all}{values}", size)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor's elements as whole numbers."""
    return tensor.view(_BITS[tensor.element_size()]) if tensor.is_floating_point() else tensor
