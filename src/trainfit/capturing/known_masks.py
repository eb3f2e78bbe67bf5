"""Masks and lengths that take only their shape from unknown data.

What `ones_like` and its relatives make is known, whatever is in the tensor that they are given. A large mask
of one value is not computed, but its sums are known: they are the lengths that a model asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trainfit.capturing.ledger import LiveStorage
from trainfit.capturing.metadata import Call, NewTensor
from trainfit.operators.value_use import FULL, ONES, ZEROS, place_of_constant

_LARGEST = 1 << 28
"""The most elements that are summed for real: a fraction of a second."""
_COPIES = ("aten._to_copy.default", "aten.clone.default")
_SUMS = ("aten.sum.default", "aten.sum.dim_IntList")


def note_constant(
    call: Call, args: Sequence[Any], lives: Sequence[LiveStorage], created: Sequence[LiveStorage]
) -> None:
    """Remember the one value of what an operator that was not run has made, if it has one."""
    if makes_floats(call):
        return  # activations and gradients, which are written to
    name, value = call.operator.name, None
    if name in ONES:
        value = 1.0
    elif name in ZEROS:
        value = 0.0
    elif name in FULL and isinstance(args[place_of_constant(name)], int | float):
        value = float(args[place_of_constant(name)])
    elif name in _COPIES:
        value = lives[0].constant
    if value is not None and value.is_integer():  # which any dtype holds as it is
        for live in created:
            live.constant = value


def makes_floats(call: Call) -> bool:
    """Whether a call has results that are no masks, indices or lengths."""
    made = [output for output in call.outputs if isinstance(output, NewTensor)]
    return any(output.dtype.is_floating_point or output.dtype.is_complex for output in made)


def constant_summed(call: Call, args: Sequence[Any], lives: Sequence[LiveStorage]) -> torch.Tensor | None:
    """Return a stand-in for the argument of a sum, where all of its elements are one known value."""
    if call.operator.name not in _SUMS or lives[0].constant is None or args[0].numel() > _LARGEST:
        return None
    return torch.full((), lives[0].constant, dtype=args[0].dtype).expand(args[0].shape)
