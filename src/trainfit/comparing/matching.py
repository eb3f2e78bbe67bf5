"""Compare two values that were taken apart, part by part."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import numpy
import torch

from trainfit.comparing.kinds import Kind, Unknown, class_name, shown, type_name
from trainfit.comparing.taking_apart import Contents

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Different:
    """One part that is not the same in two values."""

    path: str
    text: str
    size: float
    """How far apart; infinite where no number can say it."""
    only_one: bool = False
    """Whether only one of the two values has it."""

    @property
    def line(self) -> str:
        """The part and its two values."""
        return f"{self.path}: {self.text}"


@dataclass(frozen=True)
class Match:
    """How two values compare."""

    compared: int
    """How many tensors, numbers and texts were compared."""
    different: tuple[Different, ...]
    not_compared: tuple[str, ...]
    """One line for each part that cannot be compared."""
    unsteady: bool = False
    """Whether some parts are different each time they are made, so that no difference means anything."""

    @property
    def differences(self) -> tuple[str, ...]:
        """One line for each part that is not the same."""
        return tuple(part.line for part in self.different)

    @property
    def largest_difference(self) -> float:
        """Between any two numbers; infinite where no number can say it.

        That is so for NaN against a number, another shape, a part that only one of the two has, or that is
        different each time.
        """
        return max((part.size for part in self.different), default=math.inf if self.unsteady else 0.0)

    @property
    def equal(self) -> bool | None:
        """Whether everything that was compared is the same, bit by bit; None if nothing was, or not all."""
        if self.different:
            return False
        return True if self.compared and not self.unsteady else None

    def apart_from(self, by_itself: Match, why: str) -> Match:
        """Return this without the parts that differ `by_itself` as well: they prove nothing, which is why."""
        texts = {part.path: part.text for part in by_itself.different}
        # A part whose name is another each time has no counterpart to be found by.
        names_change = any(part.only_one for part in by_itself.different)
        left, excused = [], []
        for part in self.different:
            if part.path in texts or (part.only_one and names_change):
                excused.append(f"{part.path}: {why} ({texts.get(part.path, part.text)})")
            else:
                left.append(part)
        return replace(
            self,
            compared=self.compared - len(excused),
            different=tuple(left),
            not_compared=(*self.not_compared, *excused),
            unsteady=self.unsteady or bool(excused),
        )


def compare(first: Contents, second: Contents, names: tuple[str, str] = ("first", "second")) -> Match:
    """Compare two values part by part; `names` say in the differences which of the two is which."""
    compared, different, not_compared = 0, [], []
    for path in dict.fromkeys((*first, *second)):
        compared += 1
        if path not in first or path not in second:
            run = names[0] if path in first else names[1]
            different.append(Different(path, f"only in the {run} run", math.inf, only_one=True))
            continue
        found = _difference(first[path], second[path])
        if isinstance(found, Unknown):
            not_compared.append(f"{path} ({found.text})")
            compared -= 1
        elif found is not None:
            different.append(Different(path, found.text, found.size))
        elif isinstance(first[path], Kind | NoneType):
            compared -= 1
    return Match(compared, tuple(different), tuple(not_compared))


def largest_element(contents: Contents) -> float:
    """Return the largest finite magnitude among all tensors, to compare a difference with."""
    largest = 0.0
    for part in contents.values():
        if isinstance(part, torch.Tensor) and part.numel():
            numbers = part.abs() if part.is_complex() else part.to(torch.float64).abs()
            largest = max(largest, float(torch.nan_to_num(numbers, nan=0.0, posinf=0.0).max()))
    return largest


@dataclass(frozen=True)
class _Difference:
    text: str
    size: float = math.inf


def _difference(one: Any, other: Any) -> _Difference | Unknown | None:
    """Return what is different between two parts of the same name; None if nothing is."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _tensor_difference(one, other)
    kinds = [part.text if isinstance(part, Kind | Unknown) else type_name(part) for part in (one, other)]
    if kinds[0] != kinds[1]:
        return _Difference(f"{kinds[0]} and {kinds[1]}")
    if isinstance(one, Unknown) or isinstance(other, Unknown):
        return Unknown(kinds[0])
    if isinstance(one, numpy.ndarray | numpy.generic):
        return _array_difference(numpy.asarray(one), numpy.asarray(other))
    if isinstance(one, float | complex):
        same = all(map(_same_bits, *((part.real, part.imag) for part in map(complex, (one, other)))))
        return None if same else _Difference(f"{one!r} and {other!r}", _apart(one, other))
    if isinstance(one, type):
        if class_name(one) != class_name(other):
            return _Difference(f"{class_name(one)} and {class_name(other)}")
        # Defined anew in each run, it may have other attributes.
        return None if one is other else Unknown(f"the class {class_name(one)}")
    if one == other:
        return None
    is_number = isinstance(one, int) and not isinstance(one, bool)
    size = _apart(one, other) if is_number else math.inf
    return _Difference(f"{shown(one):.60} and {shown(other):.60}", size)


def _apart(one: complex, other: complex) -> float:
    """Return how far two numbers are apart; infinite where no number can say it."""
    try:
        size = float(abs(one - other))
    except OverflowError:
        return math.inf
    return math.inf if math.isnan(size) else size


def _same_bits(one: float, other: float) -> bool:
    return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))


def _array_difference(one: Any, other: Any) -> _Difference | None:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return _Difference(f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}")
    contiguous = map(numpy.ascontiguousarray, (one, other))
    try:
        tensors = [torch.from_numpy(part).reshape(one.shape) for part in contiguous]
    except (TypeError, ValueError):
        # Texts, times and numbers that torch does not have: the bytes say it all.
        same = one.tobytes() == other.tobytes()
        return None if same else _Difference(f"arrays of {one.dtype} are not the same")
    return _tensor_difference(*tensors)


def _tensor_difference(one: torch.Tensor, other: torch.Tensor) -> _Difference | None:
    kinds = [f"{part.dtype} {list(part.shape)} on {part.device}" for part in (one, other)]
    kinds = [kind.removeprefix("torch.") for kind in kinds]
    if kinds[0] != kinds[1]:
        return _Difference(f"{kinds[0]} and {kinds[1]}")
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    different = _bits(one) != _bits(other)
    if not different.any():
        return None
    try:
        numbers = [part[different].to(torch.float64) for part in (one, other)]
    except (RuntimeError, TypeError):  # torch stores more kinds of numbers than it computes with
        return _Difference(f"{int(different.sum()):,} of {one.numel():,} elements")
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
    return tensor if tensor.dtype is torch.bool else tensor.view(_BITS[tensor.element_size()])
