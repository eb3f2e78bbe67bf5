"""The stream of random numbers: kept in step with a real run, so that random decisions come out the same.

A model may decide by a draw what it runs (LayerDrop, stochastic depth). The draw itself is computed for
real; for it to be the one that a real run gets, everything drawn before (weights, dropout masks) must have
advanced the generator by the same amount. So a random operator on hollow tensors is run for real on scratch
memory, as long as that costs little: after `BUDGET_ELEMENTS` the stream is no longer followed. Of a step that
is known to decide nothing so, it is not followed at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy
import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from trainfit.operators.value_use import DRAW_NOTHING

BUDGET_ELEMENTS = 1 << 26
"""Elements drawn for real in one capture: less than a second."""
SEED = 0
"""Captures and real runs begin with this seed."""


_is_followed: ContextVar[bool] = ContextVar("is_followed", default=True)


@contextlib.contextmanager
def followed_if(decides: bool) -> Iterator[None]:
    """Follow the stream in captures inside only if draws may decide what runs."""
    token = _is_followed.set(decides)
    try:
        yield
    finally:
        _is_followed.reset(token)


class RandomStream:
    """Advances torch's generator as the operators that are not run would have done."""

    def __init__(self) -> None:
        """Begin with the whole budget, or with none."""
        self._left = BUDGET_ELEMENTS if _is_followed.get() else -1

    def advance(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: Sequence[Any]
    ) -> None:
        """Draw what the operator would have drawn, on scratch memory; `results` are those of the capture."""
        if self._left < 0 or str(func) in DRAW_NOTHING:
            return
        # What makes its tensors itself (`randn`) has none among its arguments.
        self._left -= max(_elements((args, kwargs)), _elements(results))
        if self._left < 0:
            return
        scratch_args, scratch_kwargs = tree_map(_scratch, (args, kwargs))
        try:
            func(*scratch_args, **scratch_kwargs)
        except RuntimeError:
            # A kernel that the CPU does not have, or that refuses scratch values: the stream is lost.
            self._left = -1


def _elements(values: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _scratch(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # Halves are valid probabilities.
    return torch.full_like(value, 0.5) if value.is_floating_point() else torch.zeros_like(value)


class HostRandomState:
    """The state of the generators that are not torch's, to draw the same again."""

    def __init__(self) -> None:
        """Remember the present state of NumPy's and Python's generators."""
        self._numpy = _numpy_state.get()
        self._python = _python_state.get()

    def is_present(self) -> bool:
        """Return whether nothing has been drawn since."""
        return self.same_as(HostRandomState())

    def same_as(self, other: HostRandomState) -> bool:
        """Return whether both would draw the same."""
        if self._numpy is not other._numpy:
            (_, words, *more), (_, other_words, *more_there) = self._numpy, other._numpy
            # The position, and a normal number that was drawn in advance.
            if more != more_there or not numpy.array_equal(words, other_words):
                return False
        return self._python is other._python or bool(self._python == other._python)

    def restore(self) -> None:
        """Go back to the remembered state."""
        numpy.random.set_state(self._numpy)
        random.setstate(self._python)


_BYTES = 4 * 625
"""Both usual generators are Mersenne twisters: 624 words, and a position in them."""


class _LastState:
    """The state of one generator when it was asked for last: the same object, as long as nothing is drawn.

    To describe the state takes up to 50 µs, and half a microsecond to look at the memory it lies in. That
    does not tell of a normal number that was drawn in advance: a state with one is described each time.
    """

    def __init__(self, memory: Callable[[], bytes], describe: Callable[[], Any], advance: int) -> None:
        self._memory = memory
        self._describe = describe
        self._advance = advance
        """Where a state says whether a number was drawn in advance."""
        self._last: tuple[bytes, Any] = (b"", None)
        self._with_advance = b""

    def get(self) -> Any:
        before, known = self._last
        memory = self._memory()
        if memory and memory == before:
            return known
        state = self._describe()
        if state[self._advance]:
            self._with_advance = memory
        # Another thread may have drawn meanwhile.
        elif memory and memory == self._memory() and memory != self._with_advance:
            self._last = memory, state
        return state


def _numpy_memory() -> bytes:
    generator: Any = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not numpy.random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _BYTES)


_PYTHON: Any = random._inst
_OFFSET = object.__basicsize__


def _python_is_known() -> bool:
    """Whether Python's generator lies in memory as CPython has it: the position, then the words."""
    if sys.implementation.name != "cpython" or type(_PYTHON).__basicsize__ < _OFFSET + _BYTES:
        return False
    position, *words = struct.unpack("625I", ctypes.string_at(id(_PYTHON) + _OFFSET, _BYTES))
    return bool((*words, position) == _PYTHON.getstate()[1])


_PYTHON_IS_KNOWN = _python_is_known()


def _python_memory() -> bytes:
    # A normal number that was drawn in advance is an attribute.
    if not _PYTHON_IS_KNOWN or _PYTHON.gauss_next is not None:
        return b""
    return ctypes.string_at(id(_PYTHON) + _OFFSET, _BYTES)


_numpy_state = _LastState(_numpy_memory, numpy.random.get_state, 3)
_python_state = _LastState(_python_memory, random.getstate, 2)


class RandomState:
    """The state of every generator that a step may draw from, to draw the same again."""

    def __init__(self) -> None:
        """Remember the present state of torch's, NumPy's and Python's generators."""
        self._torch = torch.default_generator.get_state()
        self._host = HostRandomState()

    def restore(self) -> None:
        """Go back to the remembered state."""
        torch.default_generator.set_state(self._torch)
        self._host.restore()


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Begin with the fixed seed in torch, NumPy and Python, and put the old states back at the end."""
    before = RandomState()
    torch.manual_seed(SEED)
    numpy.random.seed(SEED)
    random.seed(SEED)
    try:
        yield
    finally:
        before.restore()
