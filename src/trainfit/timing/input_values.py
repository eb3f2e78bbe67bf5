"""Which values an operator gets when it is run alone: valid ones, spread as in a real step.

Time depends on values where they say what to read. Indices are drawn from the whole range that the operator
accepts, because reading one row again and again would always hit the cache. Floats lie between 0 and 1,
which every operator accepts (a logarithm, a probability) and which are neither constant nor denormal. All
else is as `workspace/made_up_arguments.py` makes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from trainfit.operators.names import functional_name
from trainfit.traces import arguments
from trainfit.traces.trace import Signature

Bounds = dict[int, int]
"""By input number: indices are drawn below this."""


def index_bounds(signature: Signature) -> Bounds:
    """Return the exclusive upper bound of each input that holds indices."""
    rule = _RULES.get(functional_name(signature.name))
    if rule is None:
        return {}
    positional, _ = arguments.decode(signature.arguments)
    return {
        number: bound
        for number, bound in rule(signature, positional)
        if signature.inputs[number].dtype in ("int64", "int32") and bound > 0
    }


_Rule = Callable[[Signature, list[Any]], Iterator[tuple[int, int]]]


def _number(value: Any) -> int | None:
    return value["tensor"] if isinstance(value, dict) and "tensor" in value else None


def _into(table: int, indices: int, bound: Callable[[tuple[int, ...], list[Any]], int]) -> _Rule:
    """Indices at one position into what is at another, below a bound of its shape and of the arguments."""

    def rule(s: Signature, positional: list[Any]) -> Iterator[tuple[int, int]]:
        number, source = _number(positional[indices]), _number(positional[table])
        if number is not None and source is not None:
            yield number, bound(s.inputs[source].shape, positional)

    return rule


def _along(shape: tuple[int, ...], positional: list[Any]) -> int:
    """The dimension that the second argument says; nothing to draw where that is a name."""
    return shape[positional[1]] if shape and isinstance(positional[1], int) else 0


def _classes(shape: tuple[int, ...], positional: list[Any]) -> int:
    """Targets of a loss: classes are the second dimension, or the only one."""
    return shape[1] if len(shape) > 1 else shape[0]


def _each_dimension(s: Signature, positional: list[Any]) -> Iterator[tuple[int, int]]:
    """Advanced indexing: the list's entry number d indexes dimension d."""
    source = _number(positional[0])
    if source is None:
        return
    dimension = 0
    for entry in positional[1]:
        number = _number(entry)
        if number is not None and s.inputs[number].dtype in ("bool", "uint8"):
            dimension += len(s.inputs[number].shape)
            continue
        if number is not None:
            yield number, s.inputs[source].shape[dimension]
        dimension += 1


_RULES: dict[str, _Rule] = {
    "embedding": _into(0, 1, lambda shape, _: shape[0]),
    "embedding_dense_backward": _into(0, 1, lambda _, positional: positional[2]),
    **dict.fromkeys(
        ("index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl"), _each_dimension
    ),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _into(0, 1, _classes)),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _into(1, 2, _classes)),
    # Positions within one image.
    "max_pool2d_with_indices_backward": _into(1, -1, lambda shape, _: math.prod(shape[-2:])),
    "take": _into(0, 1, lambda shape, _: math.prod(shape)),
    **dict.fromkeys(
        (
            *("gather", "index_select", "index_add", "index_copy", "index_fill", "index_reduce"),
            *("scatter", "scatter_add", "scatter_reduce"),
        ),
        _into(0, 2, _along),
    ),
}
