"""Candidate regions of a trace: module calls, with the values inside and who needs them in backward.

Ops that write to one storage (its creator and the in-place ops after it) are one `Group`: kept or computed
again together. A group with effects outside of the region (running statistics) is never computed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainfit.operators.value_use import reads_metadata_only
from trainfit.planning.weight_casts import is_kept_by_autocast
from trainfit.trace import Interval, Trace


@dataclass
class Group:
    """Ops of a region that make one value: computed again, or kept, together."""

    ops: tuple[int, ...]
    reads: frozenset[tuple[int, int]]
    """What it reads of the region: the group, and which of its storages."""
    storages: tuple[int, ...]
    sizes: tuple[int, ...]
    """For each storage what keeping it costs between forward and backward; 0 for what is alive anyway."""
    seconds: float
    saved: tuple[bool, ...]
    """For each storage whether autograd saved it inside the region."""
    keepable: bool
    repeatable: bool
    """Whether it can be computed again: it has no effect outside, and what it reads will still be there."""
    free: bool = False
    """Views: they cost nothing and are made again."""

    @property
    def needed(self) -> bool:
        """Whether backward needs one of its storages."""
        return any(self.saved)

    @property
    def bytes(self) -> int:
        """What keeping all of its storages costs."""
        return sum(self.sizes)

    @property
    def inputs(self) -> frozenset[int]:
        """Groups of the region that it reads."""
        return frozenset(group for group, _ in self.reads)


@dataclass
class RegionGraph:
    """One module call, or several in a row, as a graph of groups, in the order of their first op."""

    calls: tuple[int, ...]
    module: int
    start: int
    end: int
    backward_start: int
    release: int
    """When autograd has let go of everything that was saved inside: the inputs are held until then."""
    groups: list[Group] = field(default_factory=list)
    group_of_op: dict[int, int] = field(default_factory=dict)
    inputs: tuple[int, ...] = ()
    """Storages made during the step before the region, and read inside."""
    casts: frozenset[int] = frozenset()
    """Weights that autocast had cast before, which are cast again with the region: not among the inputs."""
    saved: dict[int, tuple[Interval, ...]] = field(default_factory=dict)
    """The holds of autograd that checkpointing the region removes, by storage."""
    ends: dict[int, Any] = field(default_factory=dict, repr=False)
    """When storages would die without these holds, as far as someone has asked (`effects.py`)."""

    @property
    def call(self) -> int:
        """The first of its calls."""
        return self.calls[0]

    @property
    def freeable_bytes(self) -> int:
        """What autograd saved inside and would not have to keep if everything were computed again."""
        return sum(group.bytes for group in self.groups if group.needed)

    @property
    def ops(self) -> range:
        """The ops of its forward."""
        return range(self.start, self.end)


def remaining_holds(trace: Trace, number: int, regions: Sequence[RegionGraph]) -> list[Interval]:
    """Return who holds a storage besides what autograd saved inside these regions.

    A Python variable that begins in backward holds what autograd has just unpacked: it belongs to the saves
    that are released last before it.
    """
    removed = {hold for region in regions for hold in region.saved.get(number, ())}
    left = [hold for hold in trace.storages[number].holders if hold not in removed]
    if not removed:
        return left
    backward_start = min(region.backward_start for region in regions if number in region.saved)
    others = [hold for hold in left if hold.holder != "program"]
    until = max((_end(hold.end) for hold in others), default=-1)
    return others + [
        hold
        for hold in left
        if hold.holder == "program" and (hold.start < backward_start or hold.start < until)
    ]


def region_graph(trace: Trace, call_number: int, op_seconds: list[float]) -> RegionGraph | None:
    """Return the graph of a module call, or None if it cannot be a region."""
    return chain_graph(trace, (call_number,), op_seconds)


def chain_graph(trace: Trace, calls: tuple[int, ...], op_seconds: list[float]) -> RegionGraph | None:
    """Return the graph of calls in a row, or None if they cannot be a region.

    What one of them hands to the next is needed: the next one is computed again from it.
    """
    first, last = trace.calls[calls[0]], trace.calls[calls[-1]]
    start, end = first.forward_start, last.forward_end
    if any(trace.calls[n].recompute or trace.calls[n].backward_start < 0 for n in calls) or end <= start:
        return None
    if any(trace.ops[op].phase != "forward" for op in range(start, end)):
        return None
    if any(op.recompute for op in trace.ops[last.backward_start : first.backward_end]):
        # The step has a checkpoint of its own in there; what that holds the second time is not in the trace.
        return None
    saved = _saved_inside(trace, start, end, last.backward_start)
    if not saved:
        return None
    release = max(
        (hold.end if hold.end is not None else len(trace.ops)) for holds in saved.values() for hold in holds
    )
    region = RegionGraph(calls, first.module, start, end, last.backward_start, release, saved=saved)
    for before, after in itertools.pairwise(calls):
        handed = handed_on(trace, before, after)
        if handed is None:
            return None
        region.saved.setdefault(handed, ())
    _add_groups(trace, region, op_seconds)
    # Each call of several casts for itself, which one copy of the cast would not tell.
    return None if region.casts and len(calls) > 1 else region


def handed_on(trace: Trace, before: int, after: int) -> int | None:
    """Return the storage that a call hands to the call that follows it, if that is all it hands to anyone."""
    call, following = trace.calls[before], trace.calls[after]
    if call.forward_end != following.forward_start:
        return None
    made = {storage for op in trace.ops[call.forward_start : call.forward_end] for storage in op.creates}
    used = {
        storage
        for storage in made
        for reader in trace.readers[storage]
        if reader >= call.forward_end and trace.ops[reader].phase == "forward"
    }
    (handed, *others) = used or {-1}
    return handed if not others and handed >= 0 else None


def _saved_inside(trace: Trace, start: int, end: int, backward_start: int) -> dict[int, tuple[Interval, ...]]:
    """Return the holds of autograd that begin inside the region.

    A result of the last op is saved at the same time as an argument of the op that follows the region; what
    follows is released before the region's backward begins.
    """
    found: dict[int, tuple[Interval, ...]] = {}
    for number in _alive_around(trace, start, end):
        holds = tuple(
            hold
            for hold in trace.storages[number].held_by("autograd")
            if start <= hold.start < end
            or (
                (hold.start == end and (hold.end is None or hold.end > backward_start))
                and start <= trace.storages[number].start < end
            )
        )
        if holds:
            found[number] = holds
    return found


def _alive_around(trace: Trace, start: int, end: int) -> list[int]:
    """Return the storages that ops of the region read, write or make, each once."""
    found: dict[int, None] = {}
    for op in trace.ops[start:end]:
        found.update(dict.fromkeys((*op.reads, *op.writes, *op.creates)))
    return list(found)


def _add_groups(trace: Trace, region: RegionGraph, op_seconds: list[float]) -> None:
    creator: dict[int, int] = {}
    leader: dict[int, int] = {}
    outside_effect: set[int] = set()
    last_write: dict[int, int] = {}
    inputs: dict[int, None] = {}
    for number in region.ops:
        op = trace.ops[number]
        leader[number] = number
        for storage in op.creates:
            creator[storage] = number
        for storage in op.writes:
            if storage in creator:
                _join(leader, creator[storage], number)
                last_write[storage] = number
            else:
                outside_effect.add(number)
        for storage in op.reads:
            if storage not in creator and trace.storages[storage].start >= 0:
                inputs[storage] = None
    region.casts = frozenset(storage for storage in inputs if is_kept_by_autocast(trace, storage))
    region.inputs = tuple(storage for storage in inputs if storage not in region.casts)
    once = outside_effect | _reading_what_is_lost(trace, region)
    members: dict[int, list[int]] = {}
    for number in region.ops:
        members.setdefault(_find(leader, number), []).append(number)
    numbers = {first: position for position, first in enumerate(members)}
    region.group_of_op = {op: numbers[first] for first, ops in members.items() for op in ops}
    overwritten = _read_before_last_write(trace, region, creator, last_write)
    places = {
        storage: (group, place)
        for group, ops in enumerate(members.values())
        for place, storage in enumerate(s for op in ops for s in trace.ops[op].creates)
    }
    for ops in members.values():
        region.groups.append(_group(trace, region, ops, creator, places, op_seconds, once, overwritten))


def _reading_what_is_lost(trace: Trace, region: RegionGraph) -> set[int]:
    """Return the ops that read what is overwritten between the region and its backward.

    That may be an input, or a buffer that the next call of the same module moves on.
    """
    between = trace.ops[region.end : region.backward_start]
    lost = {storage for op in between if op.writes for storage in op.writes}
    if not lost:
        return set()
    lost -= {storage for op in trace.ops[region.start : region.end] for storage in op.creates}
    return {number for number in region.ops if lost.intersection(values_read(trace, number))}


def _group(
    trace: Trace,
    region: RegionGraph,
    ops: list[int],
    creator: dict[int, int],
    places: dict[int, tuple[int, int]],
    op_seconds: list[float],
    once: set[int],
    overwritten: set[int],
) -> Group:
    own = set(ops)
    storages = tuple(s for op in ops for s in trace.ops[op].creates)
    reads = frozenset(
        places[storage]
        for op in ops
        for storage in values_read(trace, op)
        if storage in creator and creator[storage] not in own
    )
    return Group(
        ops=tuple(ops),
        reads=reads,
        storages=storages,
        sizes=tuple(_kept_bytes(trace, region, storage) for storage in storages),
        seconds=sum(op_seconds[op] for op in ops),
        saved=tuple(storage in region.saved for storage in storages),
        keepable=bool(storages) and not own & overwritten,
        repeatable=not own & once,
        free=not storages and not own & once,
    )


def _kept_bytes(trace: Trace, region: RegionGraph, number: int) -> int:
    """Return what keeping a storage costs: nothing if someone outside holds it until backward anyway."""
    for hold in remaining_holds(trace, number, (region,)):
        if hold.start <= region.end and _end(hold.end) > region.backward_start:
            return 0
    return trace.occupied_bytes[number]


def values_read(trace: Trace, number: int) -> tuple[int, ...]:
    """Return the storages whose content an op reads: `empty_like` and its kind only look at the shape."""
    return () if reads_metadata_only(trace.op_name(number)) else trace.ops[number].reads


def _read_before_last_write(
    trace: Trace, region: RegionGraph, creator: dict[int, int], last_write: dict[int, int]
) -> set[int]:
    """Return the creators of storages whose earlier versions other ops read: only the last could be kept."""
    found: set[int] = set()
    for number in region.ops:
        op = trace.ops[number]
        for storage in values_read(trace, number):
            if number < last_write.get(storage, -1) and storage not in op.writes:
                found.add(creator[storage])
    return found


def _end(end: int | None) -> int:
    """Return an end that can be compared: beyond the step is later than everything."""
    return _BEYOND if end is None else end


_BEYOND = 1 << 60


def _find(leader: dict[int, int], op: int) -> int:
    while leader[op] != op:
        leader[op] = leader[leader[op]]
        op = leader[op]
    return op


def _join(leader: dict[int, int], first: int, second: int) -> None:
    a, b = _find(leader, first), _find(leader, second)
    leader[max(a, b)] = min(a, b)
