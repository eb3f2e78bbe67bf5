"""How distributed operators are divided between ranks, found once for each kind of tensor.

An optimizer's operators get lists of all parameters. torch looks for each list at every element anew, and for
every element at the whole list; most parameters are of a few kinds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from types import SimpleNamespace
from typing import Any

from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor.placement_types import _StridedShard

from trainfit.capturing.replacing import replaced


@contextlib.contextmanager
def strategies_shared() -> Iterator[None]:
    """Let equal tensors share what was found out about one of them."""
    with (
        replaced(_sharding_prop, "_propagate_use_strided_shard_flag", _at_the_list_once),
        replaced(utils, "expand_to_full_mesh_op_strategy", _once_per_kind),
    ):
        yield


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
