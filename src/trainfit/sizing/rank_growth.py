"""`RankGrowth`: the trace of a rank among more or fewer ranks, or with another batch, from few captured ones.

Where FSDP divides parameters among n ranks, each number of a rank's step is a constant, or a shard, which is
a line over 1/n: captures of two n say what it is for all others. Over the batch numbers lie on a line, too,
and what changes with n does not change with the batch, so that three captures are enough for both. Copies of
the model (`replicate`) change nothing but the size of a group. Which ranks a group has follows from the mesh.

It is exact where n divides the first dimension of every parameter; where torch pads, it is off by less than a
row of it. As `TraceGrowth`, it is a prediction of a capture: what is decided by it is confirmed by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from trainfit.sizing.trace_growth import NotTheSame, Numbers, TraceFamily, take_the_same_course
from trainfit.traces.ranks import Collective
from trainfit.traces.trace import Signature, Trace

Mesh = tuple[tuple[str, int], ...]
_WORLD = "world"
"""What the group of all ranks is called in traces."""


@dataclass(frozen=True)
class Corner:
    """A captured trace: among how many ranks parameters are divided, and with which batch."""

    shards: int
    batch: int
    trace: Trace


class RankGrowth:
    """Captured traces of one division of a model, and what lies between and beyond them."""

    def __init__(self, base: Corner, others: Sequence[Corner] = ()) -> None:
        """Keep those of the others that take the same course as the base and differ in one size only."""
        self.base = base
        alike = [o for o in others if take_the_same_course(base.trace, o.trace, ("cluster", "calls"))]
        self._shards = next((o for o in alike if o.batch == base.batch and o.shards != base.shards), None)
        self._batch = next((o for o in alike if o.shards == base.shards and o.batch != base.batch), None)
        used = [one for one in (base, self._shards, self._batch) if one is not None]
        self._family = TraceFamily(tuple(range(len(used))), [one.trace for one in used])

    def at(self, shards: int, batch: int, mesh: Mesh) -> Trace | None:
        """Return the trace of rank 0 of a mesh; None where the captured ones do not say what it is."""
        along = self._along(shards, batch)
        if along is None:
            return None
        try:
            grown = self._family.carried(self._numbers(along, shards), 0)
            return regrouped(replace(grown, settings=replace(grown.settings, batch=batch)), mesh)
        except NotTheSame:
            return None

    def _along(self, shards: int, batch: int) -> list[Fraction] | None:
        """Return how far to go along each line; None if one is missing."""
        found = []
        if self._shards is not None:
            whole = Fraction(1, self._shards.shards) - Fraction(1, self.base.shards)
            found.append((Fraction(1, shards) - Fraction(1, self.base.shards)) / whole)
        elif shards != self.base.shards:
            return None
        if self._batch is not None:
            found.append(Fraction(batch - self.base.batch, self._batch.batch - self.base.batch))
        elif batch != self.base.batch:
            return None
        return found

    def _numbers(self, along: Sequence[Fraction], shards: int) -> Numbers:
        """Return the function that adds to a number what each line says, rounded up as kernels do."""
        ranks = None if self._shards is None else (self.base.shards, self._shards.shards)

        def carried(values: Sequence[int]) -> int:
            first, *others = values
            if all(value == first for value in others):
                return first
            if ranks == tuple(values[:2]):
                return shards  # it is the number of ranks itself
            return math.ceil(first + sum((value - first) * far for value, far in zip(others, along)))

        return carried


def regrouped(trace: Trace, mesh: Mesh) -> Trace:
    """Return the trace of rank 0 with the groups of another mesh, whose dimensions have the same names.

    Raises `NotTheSame` for a group that is not along dimensions of the mesh.
    """
    assert trace.cluster is not None, "a rank of a mesh"
    if trace.cluster.mesh == mesh:
        return trace
    cluster = replace(trace.cluster, mesh=mesh, world_size=math.prod(size for _, size in mesh))
    found = tuple(_regrouped(signature, mesh) for signature in trace.signatures)
    return replace(trace, signatures=found, cluster=cluster)


def _regrouped(signature: Signature, mesh: Mesh) -> Signature:
    collective = signature.collective
    if collective is None:
        return signature
    return replace(signature, collective=_in_mesh(collective, mesh))


def _in_mesh(collective: Collective, mesh: Mesh) -> Collective:
    names, sizes = [name for name, _ in mesh], dict(mesh)
    along = group_dimensions(collective, mesh)
    places = [names.index(name) for name in along]
    if not places or places != list(range(places[0], places[-1] + 1)):
        raise NotTheSame
    step = math.prod(sizes[name] for name in names[places[-1] + 1 :])
    count = math.prod(sizes[name] for name in along)
    return replace(collective, group_size=count, ranks=((0, step * (count - 1), step),))


def group_dimensions(collective: Collective, mesh: Mesh) -> tuple[str, ...]:
    """Return the dimensions of the mesh that a group lies along; none if its name does not say.

    Groups are named for them, with a line between two that were made one; that of all ranks is the world.
    """
    names = tuple(name for name, _ in mesh)
    if collective.group == _WORLD:
        return names
    along = tuple(name for name in collective.group.split("_") if name in names)
    return along if "_".join(along) == collective.group else ()
