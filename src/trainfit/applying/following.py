"""Follows a plan's list of ops while the model runs: which decision belongs to the op that runs now?

Ops are matched by name and position. One thing may differ without being another computation: autocast casts a
weight once and then has it in its cache, so that the cast may be missing where it was in the trace, or be
there where it was not. Hooks on a region's own module are outside of the region, in the trace and here: they
are called once, not again in backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from trainfit.operators.names import CAST, is_operator
from trainfit.operators.value_use import SHOW_VALUES
from trainfit.plans.decisions import Decision
from trainfit.plans.plan import OpDecision, RegionKind


class Follower:
    """Goes through the ops of one region call; once lost, it says `save` to everything."""

    def __init__(
        self, ops: tuple[OpDecision, ...], host_inputs: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """Begin at the first op; `host_inputs` are arguments of ops that belong in the host's memory."""
        self._ops = ops
        self._host_inputs = host_inputs or {}
        self.position = 0
        self._matched: OpDecision | None = None
        self._by_data = False
        self.larger: str | None = None
        """What an op made that is more than in the trace, in words."""
        self.lost: str | None = None
        """What the model did that the plan does not have, in words."""

    def decision(self, name: str, *, weight_cast: bool) -> Decision:
        """Return the decision for the op that runs now; `weight_cast` if autocast's cache may hold it."""
        if self.lost is not None:
            return Decision.SAVE
        ops, position, self._matched = self._ops, self.position, None
        while position < len(ops) and ops[position].name != name:
            if weight_cast:
                return Decision.RECOMPUTE
            if ops[position].name != CAST:
                break
            position += 1
        if position < len(ops) and ops[position].name == name:
            self.position, self._matched = position + 1, ops[position]
            return ops[position].decision
        if weight_cast:
            return Decision.RECOMPUTE
        expected = ops[self.position].name if self.position < len(ops) else "the end"
        self.lost = f"op {self.position} is {name}, where the plan has {expected}"
        return Decision.SAVE

    @property
    def host_inputs(self) -> Sequence[int]:
        """Which tensors among the arguments of the op that runs now belong in the host's memory."""
        return () if self._matched is None else self._host_inputs.get(self.position - 1, ())

    def made(self, func: OpOverload, result: Any) -> None:
        """Compare the result of the op whose decision was asked for last with its result in the trace.

        A smaller one is within the plan's promise. A cast may be another op of the trace than the one it
        was matched with; and after an op whose result is as long as its data says, sizes differ from batch to
        batch.
        """
        op = self._matched
        if op is None or op.name == CAST or self._by_data or self.lost or self.larger:
            return
        if torch.Tag.dynamic_output_shape in func.tags:
            self._by_data = True
            return
        if isinstance(result, torch.Tensor) and len(op.shapes) == 1 and result.shape != op.shapes[0]:
            here, planned = list(result.shape), list(op.shapes[0])
            if math.prod(here) > math.prod(planned):
                self.larger = f"{op.name} makes {here}, where the plan has {planned}"

    def finish(self) -> None:
        """The region has ended; ops that are left over mean that it did something else."""
        if self.lost is not None:
            return
        if any(op.name != CAST for op in self._ops[self.position :]):
            self.lost = f"it ended after {self.position} of {len(self._ops)} ops"


def _followed(kind: RegionKind) -> Iterator[tuple[int, OpDecision]]:
    """Yield the ops of a plan that are followed: operators that compute, and do not only read values."""
    for number, op in enumerate(kind.ops):
        if is_operator(op.name) and op.name not in SHOW_VALUES:
            yield number, op


def followed_ops(kind: RegionKind) -> tuple[OpDecision, ...]:
    """Return the ops of a kind of regions that are followed."""
    return tuple(op for _, op in _followed(kind))


def followed_inputs(kind: RegionKind) -> dict[int, tuple[int, ...]]:
    """Return the inputs that belong in the host's memory: arguments of ops that are followed."""
    if not kind.host_inputs:
        return {}
    found: dict[int, tuple[int, ...]] = {}
    position_of = {number: position for position, (number, _) in enumerate(_followed(kind))}
    for place in kind.host_inputs:
        if place.op in position_of:
            position = position_of[place.op]
            found[position] = (*found.get(position, ()), place.argument)
    return found
