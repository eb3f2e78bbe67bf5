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
    positional, keyword = arguments.decode(signature.arguments)
    return {
        number: bound
        for number, bound in rule(signature, positional, keyword)
        if signature.inputs[number].dtype in ("int64", "int32") and bound > 0
    }


_Rule = Callable[[Signature, list[Any], dict[str, Any]], Iterator[tuple[int, int]]]


def _number(value: Any) -> int | None:
    return value["tensor"] if isinstance(value, dict) and "tensor" in value else None


def _rows_of(table: int, indices: int, dim: int | None = None) -> _Rule:
    """Indices at one position into a dimension (named by an argument, if not given) of another."""

    def rule(s: Signature, positional: list[Any], keyword: dict[str, Any]) -> Iterator[tuple[int, int]]:
        number, source = _number(positional[indices]), _number(positional[table])
        if number is not None and source is not None:
            shape = s.inputs[source].shape
            axis = dim if dim is not None else positional[1]
            if isinstance(axis, int) and shape:
                yield number, shape[axis]

    return rule


def _classes(scores: int, target: int) -> _Rule:
    """Targets of a loss: classes are the second dimension, or the only one."""

    def rule(s: Signature, positional: list[Any], keyword: dict[str, Any]) -> Iterator[tuple[int, int]]:
        number, source = _number(positional[target]), _number(positional[scores])
        if number is not None and source is not None:
            shape = s.inputs[source].shape
            yield number, shape[1] if len(shape) > 1 else shape[0]

    return rule


def _each_dimension(
    s: Signature, positional: list[Any], keyword: dict[str, Any]
) -> Iterator[tuple[int, int]]:
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


def _given_rows(s: Signature, positional: list[Any], keyword: dict[str, Any]) -> Iterator[tuple[int, int]]:
    number = _number(positional[1])
    if number is not None:
        yield number, positional[2]


def _plane(s: Signature, positional: list[Any], keyword: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Max pooling's backward: positions within one image."""
    source, number = _number(positional[1]), _number(positional[-1])
    if source is not None and number is not None:
        yield number, math.prod(s.inputs[source].shape[-2:])


def _everything(s: Signature, positional: list[Any], keyword: dict[str, Any]) -> Iterator[tuple[int, int]]:
    source, number = _number(positional[0]), _number(positional[1])
    if source is not None and number is not None:
        yield number, math.prod(s.inputs[source].shape)


_RULES: dict[str, _Rule] = {
    "embedding": _rows_of(0, 1, dim=0),
    "embedding_dense_backward": _given_rows,
    "index": _each_dimension,
    "_unsafe_index": _each_dimension,
    "index_put": _each_dimension,
    "_unsafe_index_put": _each_dimension,
    "_index_put_impl": _each_dimension,
    "nll_loss_forward": _classes(0, 1),
    "nll_loss_backward": _classes(1, 2),
    "nll_loss2d_forward": _classes(0, 1),
    "nll_loss2d_backward": _classes(1, 2),
    "max_pool2d_with_indices_backward": _plane,
    "take": _everything,
    **dict.fromkeys(
        (
            *("gather", "index_select", "index_add", "index_copy", "index_fill", "index_reduce"),
            *("scatter", "scatter_add", "scatter_reduce"),
        ),
        _rows_of(0, 2),
    ),
}
