"""What selective checkpointing of one module can trade: bytes and seconds of its ops, and the curve of both.

The statistics of PyTorch's `SACEstimator`, read off a trace: per op its seconds and bytes, whether it is a
view, random or saved by autograd, and with which op it shares a storage (in-place). An op is stored or
recomputed:

- views are always recomputed, and so is what is overwritten later in the module;
- what has effects outside (running statistics) is always stored, and so is what is alive anyway;
- ops that write to one storage go together, and so do all random ops of the module.

Ops after the last value that backward needs are left out: recomputation stops before them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from trainfit.planning import minimum_cut
from trainfit.planning.minimum_cut import Choice
from trainfit.planning.regions import RegionGraph
from trainfit.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class OpStats:
    """One op of a module's forward. Seconds of recomputing it, bytes of storing its results."""

    name: str
    seconds: float
    bytes: int
    view: bool = False
    random: bool = False
    saved_bytes: int = 0
    """What autograd keeps of its results for backward."""
    parent: int | None = None
    """The op of the module that made the storage which this one writes to."""
    storable: bool = True
    repeatable: bool = True


@dataclass(frozen=True)
class SacStats:
    """The ops of one module call, in order."""

    ops: tuple[OpStats, ...]
    store_random: bool = False
    """Whether random ops must be stored, rather than all of them stored or none."""

    @property
    def bytes(self) -> int:
        """What storing everything would take."""
        return sum(op.bytes for op in self.ops)

    @property
    def saved_bytes(self) -> int:
        """What autograd keeps if nothing is checkpointed."""
        return sum(op.saved_bytes for op in self.ops)

    @property
    def seconds(self) -> float:
        """What recomputing everything would take."""
        return sum(op.seconds for op in self.ops)


@dataclass(frozen=True, slots=True)
class Unit:
    """Ops that are stored or recomputed together."""

    ops: tuple[int, ...]
    bytes: int
    seconds: float
    always: str = ""
    """`store` or `recompute` if there is no choice."""


def units_of(stats: SacStats) -> tuple[Unit, ...]:
    """Return the ops in groups that share a fate, in the order of their first op."""
    members: dict[int, list[int]] = {}
    leader: list[int] = []
    for number, op in enumerate(stats.ops):
        first = number if op.parent is None else leader[op.parent]
        leader.append(first)
        members.setdefault(first, []).append(number)
    together = {leader[number] for number, op in enumerate(stats.ops) if op.random}
    if together:
        members[min(together)] = sorted(number for first in together for number in members.pop(first))
    return tuple(_unit(stats, tuple(members[first])) for first in sorted(members))


def _unit(stats: SacStats, ops: tuple[int, ...]) -> Unit:
    found = [stats.ops[number] for number in ops]
    size = sum(op.bytes for op in found)
    if not all(op.repeatable for op in found) or (stats.store_random and any(op.random for op in found)):
        always = "store"
    elif all(op.view for op in found) or not all(op.storable for op in found if not op.view):
        always = "recompute"
    else:
        always = "store" if size == 0 else ""
    return Unit(ops, size, sum(op.seconds for op in found), always)


def greedy_order(stats: SacStats) -> tuple[Unit, ...]:
    """Return the units that may be discarded: what is always recomputed, then by bytes per second."""

    def worth(unit: Unit) -> tuple[bool, float]:
        return unit.always == "recompute", unit.bytes / max(unit.seconds, 1e-15)

    free = [unit for unit in units_of(stats) if unit.always != "store"]
    return tuple(sorted(free, key=worth, reverse=True))


@dataclass(frozen=True)
class Line:
    """A piece of the curve: `seconds = slope * share + intercept`, both as shares of the module's own."""

    slope: float
    intercept: float


@dataclass(frozen=True)
class TradeOff:
    """The curve of a module: share of its bytes discarded against share of its seconds added.

    It is the exact lower bound of all policies: discarding by bytes per second, and the last unit in part, is
    the relaxed knapsack. Convex, so that it is the largest of its lines. Lines that someone else has fitted
    to a curve take its place if they are given.
    """

    bytes: int
    saved_bytes: int
    seconds: float
    breakpoints: tuple[tuple[float, float], ...]
    """(share discarded, share of the seconds), rising in both."""
    fitted: tuple[Line, ...] = ()
    """Lines in the place of those between the breakpoints, of which only the first and last share count."""

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines between the breakpoints; a curve of one point is a level line."""
        if self.fitted:
            return self.fitted
        if len(self.breakpoints) == 1:
            return (Line(0.0, self.breakpoints[0][1]),)
        found: list[Line] = []
        for (left, low), (right, high) in pairwise(self.breakpoints):
            slope = (high - low) / (right - left)
            found.append(Line(slope, low - slope * left))
        return tuple(found)

    @property
    def least_share(self) -> float:
        """What is discarded in any case, as a share of the bytes."""
        return self.breakpoints[0][0]

    @property
    def most_share(self) -> float:
        """What can be discarded at most."""
        return self.breakpoints[-1][0]

    def seconds_share(self, share: float) -> float:
        """Return the share of the seconds that discarding a share of the bytes takes.

        A fit may lie below zero, or above one; nothing takes less than no time.
        """
        return max(0.0, *(line.slope * share + line.intercept for line in self.lines))

    @property
    def most_seconds_share(self) -> float:
        """The largest share of the seconds, which a convex curve has at one of its ends."""
        return max(1.0, self.seconds_share(self.least_share), self.seconds_share(self.most_share))


def trade_off(stats: SacStats) -> TradeOff:
    """Return the curve that follows from the greedy order; breakpoints on a straight line are left out."""
    total_bytes, total_seconds = max(stats.bytes, 1), max(stats.seconds, 1e-30)
    points = [(0.0, 0.0)]
    for unit in greedy_order(stats):
        share, seconds = points[-1]
        point = (share + unit.bytes / total_bytes, seconds + unit.seconds / total_seconds)
        same_place = unit.always == "recompute" or point[0] - share < 1e-12
        if same_place or (len(points) > 1 and _straight(points[-2], points[-1], point)):
            points.pop()
        points.append(point)
    return TradeOff(stats.bytes, stats.saved_bytes, stats.seconds, tuple(points))


def _straight(first: tuple[float, float], second: tuple[float, float], third: tuple[float, float]) -> bool:
    before = (second[1] - first[1]) * (third[0] - second[0])
    after = (third[1] - second[1]) * (second[0] - first[0])
    return abs(before - after) <= 1e-12


def sac_stats(trace: Trace, region: RegionGraph, op_seconds: list[float]) -> SacStats:
    """Read the statistics of one module call off the trace; its groups say which ops share storages."""
    position = {number: place for place, number in enumerate(_counted(region))}
    found: list[OpStats] = []
    for number in position:
        group = region.groups[region.group_of_op[number]]
        signature = trace.signatures[trace.ops[number].signature]
        first = group.ops[0]
        saved = sum(size for size, saved in zip(group.sizes, group.saved) if saved)
        found.append(
            OpStats(
                name=signature.name,
                seconds=op_seconds[number],
                bytes=group.bytes if number == first else 0,
                view=group.free,
                random=signature.random,
                saved_bytes=saved if number == first else 0,
                parent=None if number == first else position[first],
                storable=group.keepable,
                repeatable=group.repeatable,
            )
        )
    return SacStats(tuple(found))


def only_saved(stats: SacStats) -> SacStats:
    """Return the statistics as if what autograd does not keep could be stored for nothing.

    No policy that is executed does with less: what is stored and not needed is not held.
    """
    ops = [
        replace(op, bytes=op.saved_bytes, seconds=op.seconds if op.saved_bytes else 0.0) for op in stats.ops
    ]
    return replace(stats, ops=tuple(ops))


def choice_of(region: RegionGraph, policy: list[int]) -> Choice:
    """Turn a policy (1: stored, 0: recomputed, one per counted op) into the choice of a region."""
    repeated = {region.group_of_op[op] for op, stored in zip(_counted(region), policy) if not stored}
    return minimum_cut.choice_of(
        region.groups, frozenset(number for number in repeated if not region.groups[number].free)
    )


def _counted(region: RegionGraph) -> list[int]:
    """Return the ops of the groups up to the last one that backward needs."""
    last = max(number for number, group in enumerate(region.groups) if group.needed)
    return [op for op in region.ops if region.group_of_op[op] <= last]
