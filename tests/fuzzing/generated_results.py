"""Pairs of results, generated: the same, or different in one bit, one NaN, one name, one type."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from hypothesis import strategies as st

FLOATS = st.one_of(st.floats(), st.sampled_from((0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1.0)))
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8),
    *(torch.bool, torch.complex64, torch.float8_e4m3fn),
)
SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (3,), (2, 2), (0,), (2, 0))


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.sampled_from(SHAPES))
    count = math.prod(shape)
    numbers = draw(st.lists(st.one_of(FLOATS, st.integers(-3, 3)), min_size=count, max_size=count))
    dtype = draw(st.sampled_from(DTYPES))
    if not dtype.is_floating_point and not dtype.is_complex:
        numbers = [int(number) % 3 if math.isfinite(number) else 1 for number in numbers]
    tensor = torch.tensor(numbers, dtype=torch.float64).reshape(shape).to(dtype)
    return tensor.t() if len(shape) == 2 and draw(st.booleans()) else tensor


def _arrays() -> st.SearchStrategy[Any]:
    tensors = _tensors().filter(lambda t: t.dtype not in (torch.bfloat16, torch.float8_e4m3fn))
    return tensors.map(lambda tensor: tensor.numpy())


PLAIN = st.one_of(FLOATS, st.integers(), st.booleans(), st.none(), st.text(max_size=3), st.complex_numbers())
KEYS = st.one_of(st.sampled_from(("loss", "a", "")), st.integers(0, 2), st.booleans(), st.none())


def _containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inside, max_size=3)
    return st.one_of(lists, lists.map(tuple), st.dictionaries(KEYS, inside, max_size=3))


RESULTS = st.recursive(st.one_of(PLAIN, _tensors(), _arrays()), _containers, max_leaves=6)


@dataclass(frozen=True)
class Pair:
    """Two results, and how the second came from the first."""

    first: Any
    second: Any
    how: str


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """Draw two results: mostly the second is the first with one change."""
    first = draw(RESULTS)
    how = draw(st.sampled_from(("same", "changed", "changed", "changed", "another")))
    if how == "another":
        return Pair(first, draw(RESULTS), how)
    second = copy.deepcopy(first)
    if how == "changed":
        second = _with_a_change(draw, second)
    return Pair(first, second, how)


def _with_a_change(draw: st.DrawFn, value: Any) -> Any:
    """Return the value with a change at one place in it."""
    if isinstance(value, dict) and value:
        key = draw(st.sampled_from(list(value)))
        if draw(st.integers(0, 5)) == 5:
            return {name: held for name, held in value.items() if name != key}
        return value | {key: _with_a_change(draw, value[key])}
    if isinstance(value, list | tuple) and value:
        if draw(st.integers(0, 5)) == 5:
            return draw(st.sampled_from((list(value), tuple(value), [*value, 0], value[:-1])))
        place = draw(st.integers(0, len(value) - 1))
        parts = [_with_a_change(draw, part) if n == place else part for n, part in enumerate(value)]
        return type(value)(parts)
    if isinstance(value, torch.Tensor):
        return _changed_tensor(draw, value)
    if isinstance(value, numpy.ndarray):
        return _changed_tensor(draw, torch.from_numpy(value)).numpy()
    if isinstance(value, float):
        return draw(
            st.sampled_from((math.nextafter(value, 0.0), -value, math.nan, torch.tensor(value), None))
        )
    return draw(st.sampled_from((0, 0.0, None, False, True, "", [value], math.nan)))


def _changed_tensor(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    changes: list[Callable[[], torch.Tensor]] = [
        lambda: tensor.clone(),
        lambda: tensor[None],
        lambda: tensor.to(_another_dtype(tensor.dtype)),
        lambda: tensor.clone(memory_format=torch.contiguous_format),
    ]
    if tensor.numel() and tensor.dtype != torch.bool:
        changes += [lambda: _one_bit(draw, tensor)] * 3
    return draw(st.sampled_from(changes))()


def _another_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype != torch.float64 else torch.float32


def _one_bit(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """Flip one bit of one element; of a NaN, that may give another NaN, which is the same."""
    changed = tensor.clone(memory_format=torch.contiguous_format)
    bits = changed.reshape(-1).view(torch.uint8)
    bits[draw(st.integers(0, bits.numel() - 1))] ^= 1 << draw(st.integers(0, 7))
    return changed
