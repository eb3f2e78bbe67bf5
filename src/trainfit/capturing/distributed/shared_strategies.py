"""How distributed operators are divided between ranks, found once for each kind of tensor.

An optimizer's operators get lists of all parameters. torch looks for each list at every element anew, and for
every element at the whole list; most parameters are of a few kinds. Operators on lists (`_foreach_`) treat
each element by itself, so that one of each kind says what all others become. What a result's shape is follows
from the shapes alone, whatever the mesh: captures that follow each other in one process share that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, TupleStrategy
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor.placement_types import _StridedShard

from trainfit.capturing.replacing import replaced

_ON_LISTS = "aten::_foreach_"
_MOST_KNOWN = 20_000
"""Results whose shapes are remembered, so that a process that captures for days does not grow."""
_NOTHING_KNOWN = object()
_known_results: dict[Hashable, Any] = {}


@contextlib.contextmanager
def strategies_shared() -> Iterator[None]:
    """Let equal tensors share what was found out about one of them."""
    with (
        replaced(_sharding_prop, "_propagate_use_strided_shard_flag", _at_the_list_once),
        replaced(utils, "expand_to_full_mesh_op_strategy", _once_per_kind),
        replaced(_sharding_prop, "_expand_single_dim_strategy_to_mesh", _one_of_each_kind),
        replaced(_sharding_prop.ShardingPropagator, "_propagate_tensor_meta_non_cached", _results_known),
    ):
        yield


def _results_known(original: Any) -> Any:
    """Ask for the shapes of results once for each kind of arguments."""

    def propagate(self: Any, op_schema: OpSchema) -> Any:
        columns = _columns(op_schema, list, DTensorSpec)
        try:
            few, places = _places([] if columns is None else list(zip(*(map(_sort, one) for one in columns))))
            asked = op_schema if columns is None else _with_few(op_schema, few, list)
            key = (asked.op, torch.get_default_dtype(), *map(_shaped, asked.args_schema))
            key += tuple((name, _shaped(value)) for name, value in asked.kwargs_schema.items())
            found = _known_results.get(key, _NOTHING_KNOWN)
        except TypeError:  # something in it cannot be compared
            return original(self, op_schema)
        if found is _NOTHING_KNOWN:
            found = original(self, asked)
            if len(_known_results) >= _MOST_KNOWN:
                _known_results.clear()
            _known_results[key] = found
        if columns is None or found is None:
            return found
        return type(found)(found[place] for place in places)

    return propagate


def _one_of_each_kind(original: Any) -> Any:
    """Look for the strategies of one element of each kind."""

    def expand(mesh: Any, op_schema: OpSchema, info: Any, results: Any) -> Any:
        columns = _columns(op_schema, TupleStrategy, OpStrategy)
        try:
            keys = [] if columns is None else list(zip(*(map(_described, one) for one in columns)))
            few, places = _places(keys)
        except TypeError:
            return original(mesh, op_schema, info, results)
        if columns is None or len(few) == len(places):
            return original(mesh, op_schema, info, results)
        asked = _with_few(op_schema, few, TupleStrategy)
        fewer = results if results is None else [results[number] for number in few]
        found = original(mesh, asked, info, fewer)

        def expanded(operator: Any, *_: Any) -> Any:
            some = found(operator, asked.args_meta, asked.kwargs_meta)
            return TupleStrategy(children=[some.children[place] for place in places])

        return expanded

    return expand


def _columns(op_schema: OpSchema, lists: type, of: type) -> list[Sequence[Any]] | None:
    """Return the lists of tensors that an operator works on element by element; None if it does not."""
    if not op_schema.op.name().startswith(_ON_LISTS):
        return None
    found = [_elements(one) for one in op_schema.args_schema if isinstance(one, lists | tuple)]
    alike = len({len(one) for one in found}) == 1
    if not found or not alike or op_schema.kwargs_schema:
        return None
    known = all(isinstance(one, of | int | float) for column in found for one in column)
    return found if known else None


def _elements(values: Any) -> Sequence[Any]:
    found: Sequence[Any] = values.children if isinstance(values, TupleStrategy) else values
    return found


def _places(keys: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Return the first element of each kind, and for each element which of these is of its kind."""
    first: dict[Hashable, int] = {}
    few: list[int] = []
    places: list[int] = []
    for number, key in enumerate(keys):
        if key not in first:
            first[key] = len(few)
            few.append(number)
        places.append(first[key])
    return few, places


def _with_few(op_schema: OpSchema, few: Sequence[int], lists: type) -> OpSchema:
    """Return the call with some elements of its lists."""

    def fewer(value: Any) -> Any:
        if not isinstance(value, lists | tuple):
            return value
        chosen = [_elements(value)[number] for number in few]
        if isinstance(value, TupleStrategy):
            return TupleStrategy(children=chosen)
        return tuple(chosen) if isinstance(value, tuple) else chosen

    return OpSchema(
        op_schema.op,
        tuple(fewer(value) for value in op_schema.args_schema),
        op_schema.kwargs_schema,
        op_schema.schema_info,
    )


def _sort(element: Any) -> Hashable:
    """Return what the shape of a result can depend on: of numbers, one for each element, not their values."""
    if isinstance(element, int | float):
        return type(element).__qualname__
    return _shaped(element)


def _shaped(value: Any) -> Hashable:
    """Return what a result's shape can depend on: of a tensor its shape, and what kind of device has it."""
    if isinstance(value, DTensorSpec):
        return value.tensor_meta, value.mesh.device_type
    if isinstance(value, list | tuple):
        return type(value), tuple(_shaped(one) for one in value)
    same: Hashable = value
    return type(value), same


def _at_the_list_once(original: Any) -> Any:
    """What is decided depends on which flags there are among the inputs, not on how many inputs have them."""
    last: list[Any] = [None, None]

    def propagate(op_strategy: Any, op_schema: OpSchema) -> None:
        if last[0] is not op_schema:
            strided = [
                spec
                for spec in op_schema.args_spec
                if any(isinstance(placement, _StridedShard) for placement in spec.placements)
            ]
            by_flag = {spec.use_strided_shard_as_shard_order: spec for spec in strided}
            last[:] = op_schema, SimpleNamespace(args_spec=tuple(by_flag.values()))
        if last[1].args_spec:
            original(op_strategy, last[1])

    return propagate


def _once_per_kind(original: Any) -> Any:
    found: dict[Hashable, Any] = {}

    def expand(mesh: Any, op_schema: OpSchema, expanded: Any, **how: Any) -> Any:
        try:
            key = (
                mesh,
                op_schema.op,
                _kind(op_schema),
                _described(expanded),
                *_described(sorted(how.items())),
            )
            known = found.get(key)
        except TypeError:  # something in it cannot be compared
            return original(mesh, op_schema, expanded, **how)
        if known is None:
            known = found[key] = original(mesh, op_schema, expanded, **how)
        return known

    return expand


def _kind(op_schema: OpSchema) -> Hashable:
    named = tuple((name, _described(value)) for name, value in op_schema.kwargs_schema.items())
    return (*(_described(value) for value in op_schema.args_schema), *named)


def _described(value: Any) -> tuple[Hashable, ...]:
    if isinstance(value, OpStrategy):
        return tuple(strategy.output_specs for strategy in value.strategies)
    if isinstance(value, list | tuple):
        return tuple(_described(one) for one in value)
    same: Hashable = value
    return type(value).__qualname__, same
