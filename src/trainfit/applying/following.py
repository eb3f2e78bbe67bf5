"""Follows a plan's list of ops while the model runs: which decision belongs to the op that runs now?

Ops are matched by name and position. One thing may differ without being another computation: autocast casts a
weight once and then has it in its cache, so the cast may be missing where it was in the trace, or be there
where it was not.
"""

from __future__ import annotations

from trainfit.plans import OpDecision

_CAST = "aten._to_copy.default"
SAVE, RECOMPUTE, SKIP = "save", "recompute", "skip"


def is_operator(name: str) -> bool:
    """Whether a trace's op is an operator call; memory made without one has a name of two parts."""
    return name.count(".") >= 2


class Follower:
    """Goes through the ops of one region call; once lost, it says `save` to everything."""

    def __init__(self, ops: tuple[OpDecision, ...]) -> None:
        """Begin at the first op."""
        self._ops = ops
        self._next = 0
        self.lost: str | None = None
        """What the model did that the plan does not have, in words."""

    def decision(self, name: str, *, weight_cast: bool, autocast: bool) -> str:
        """Return the decision for the op that runs now; `weight_cast` if autocast's cache may hold it."""
        if self.lost is not None:
            return SAVE
        ops, position = self._ops, self._next
        while position < len(ops) and ops[position].name != name:
            if weight_cast:
                return RECOMPUTE
            if not (autocast and ops[position].name == _CAST):
                break
            position += 1
        if position < len(ops) and ops[position].name == name:
            self._next = position + 1
            return ops[position].decision
        if weight_cast:
            return RECOMPUTE
        expected = ops[self._next].name if self._next < len(ops) else "the end"
        self.lost = f"op {self._next} is {name}, where the plan has {expected}"
        return SAVE

    def finish(self, *, autocast: bool) -> None:
        """The region has ended; ops that are left over mean that it did something else."""
        if self.lost is not None:
            return
        left = self._ops[self._next :]
        if any(not (autocast and op.name == _CAST) for op in left):
            self.lost = f"it ended after {self._next} of {len(self._ops)} ops"


def followed_ops(ops: tuple[OpDecision, ...]) -> tuple[OpDecision, ...]:
    """Return the ops of a plan that a real run shows: those that are operators."""
    return tuple(op for op in ops if is_operator(op.name))
