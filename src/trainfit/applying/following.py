"""Follows a plan's list of ops while the model runs: which decision belongs to the op that runs now?

Ops are matched by name and position. Two things may differ without being another computation. Autocast casts
a weight once and then has it in its cache: the cast may be missing where it was in the trace, or be there
where it was not. And ops of the hooks on a region's own module are in the trace, but outside of the region:
hooks are called once, not again in backward.
"""

from __future__ import annotations

from trainfit.plans import OpDecision

_CAST = "aten._to_copy.default"
VALUES_READ = frozenset(("aten._local_scalar_dense.default", "aten.equal.default", "aten.allclose.default"))
"""Operators that return plain values: they run once, and are answered with the same values later."""
SAVE, RECOMPUTE, SKIP = "save", "recompute", "skip"


def is_operator(name: str) -> bool:
    """Whether a trace's op is an operator call; memory made without one has a name of two parts."""
    return name.count(".") >= 2


class Follower:
    """Goes through the ops of one region call; once lost, it says `save` to everything."""

    def __init__(self, ops: tuple[OpDecision, ...], *, hooked: bool = False) -> None:
        """Begin at the first op; of a `hooked` module some at both ends may be missing."""
        self._ops = ops
        self._hooked = hooked
        self._next = 0
        self.lost: str | None = None
        """What the model did that the plan does not have, in words."""

    def decision(self, name: str, *, weight_cast: bool) -> str:
        """Return the decision for the op that runs now; `weight_cast` if autocast's cache may hold it."""
        if self.lost is not None:
            return SAVE
        ops, position = self._ops, self._next
        while position < len(ops) and ops[position].name != name:
            if weight_cast:
                return RECOMPUTE
            if ops[position].name != _CAST and not (self._hooked and self._next == 0):
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

    def finish(self) -> None:
        """The region has ended; ops that are left over mean that it did something else."""
        if self.lost is not None or self._hooked:
            return
        if any(op.name != _CAST for op in self._ops[self._next :]):
            self.lost = f"it ended after {self._next} of {len(self._ops)} ops"


def followed_ops(ops: tuple[OpDecision, ...]) -> tuple[OpDecision, ...]:
    """Return the ops of a plan that are followed: operators that compute, and do not only read values."""
    return tuple(op for op in ops if is_operator(op.name) and op.name not in VALUES_READ)
