"""The stream of random numbers: kept in step with a real run, so that random decisions come out the same.

A model may decide by a draw what it runs (LayerDrop, stochastic depth). The draw itself is computed for
real; for it to be the one that a real run gets, everything drawn before (weights, dropout masks) must have
advanced the generator by the same amount. So a random operator on hollow tensors is run for real on scratch
memory, as long as that costs little: after `BUDGET_ELEMENTS` the stream is no longer followed.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
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


class RandomStream:
    """Advances torch's generator as the operators that are not run would have done."""

    def __init__(self) -> None:
        """Begin with the whole budget."""
        self._left = BUDGET_ELEMENTS

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
        self._numpy: Any = numpy.random.get_state()
        self._python = random.getstate()

    def is_present(self) -> bool:
        """Return whether nothing has been drawn since."""
        return self.same_as(HostRandomState())

    def same_as(self, other: HostRandomState) -> bool:
        """Return whether both would draw the same."""
        _, words, position, *_ = self._numpy
        _, other_words, other_position, *_ = other._numpy
        same = position == other_position and numpy.array_equal(words, other_words)
        return same and self._python == other._python

    def restore(self) -> None:
        """Go back to the remembered state."""
        numpy.random.set_state(self._numpy)
        random.setstate(self._python)


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
