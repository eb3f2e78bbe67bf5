"""Ops of a region that are kept or recomputed together: those that write to one storage.

That is its creator and the in-place ops after it. A group with effects outside of the region (running
statistics) is never recomputed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trainfit.operators.value_use import reads_metadata_only
from trainfit.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class Group:
    """Ops of a region that make one value: recomputed, or kept, together."""

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
    """Whether it can be recomputed: it has no effect outside, and what it reads will still be there."""
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


def groups_of(
    trace: Trace,
    ops: Sequence[int],
    *,
    sizes: Mapping[int, int],
    saved: Collection[int],
    once: set[int],
    op_seconds: list[float],
) -> tuple[Group, ...]:
    """Return the groups of ops in the order of their first op.

    `sizes` says what keeping each storage costs that the ops make, `saved` which autograd saved, and `once`
    which ops cannot run again.
    """
    creator = {storage: number for number in ops for storage in trace.ops[number].creates}
    leader = {number: number for number in ops}
    for number in ops:
        for storage in trace.ops[number].writes:
            if storage in creator:
                _join(leader, creator[storage], number)
    members: dict[int, list[int]] = {}
    for number in ops:
        members.setdefault(_find(leader, number), []).append(number)
    made = [tuple(s for op in own for s in trace.ops[op].creates) for own in members.values()]
    places = {s: (group, place) for group, own in enumerate(made) for place, s in enumerate(own)}
    overwritten = _read_before_last_write(trace, ops, creator)
    found: list[Group] = []
    for own, storages in zip(members.values(), made):
        read = {storage for op in own for storage in values_read(trace, op)}
        repeatable = once.isdisjoint(own)
        found.append(
            Group(
                ops=tuple(own),
                reads=frozenset(places[s] for s in read if s in places and s not in storages),
                storages=storages,
                sizes=tuple(sizes[storage] for storage in storages),
                seconds=sum(op_seconds[op] for op in own),
                saved=tuple(storage in saved for storage in storages),
                keepable=bool(storages) and overwritten.isdisjoint(own),
                repeatable=repeatable,
                free=not storages and repeatable,
            )
        )
    return tuple(found)


def values_read(trace: Trace, number: int) -> tuple[int, ...]:
    """Return the storages whose content an op reads: `empty_like` and its kind only look at the shape."""
    return () if reads_metadata_only(trace.op_name(number)) else trace.ops[number].reads


def _read_before_last_write(trace: Trace, ops: Sequence[int], creator: dict[int, int]) -> set[int]:
    """Return the creators of storages whose earlier versions other ops read: only the last could be kept."""
    last_write = {storage: number for number in ops for storage in trace.ops[number].writes}
    return {
        creator[storage]
        for number in ops
        for storage in values_read(trace, number)
        if storage in creator
        and number < last_write.get(storage, -1)
        and storage not in trace.ops[number].writes
    }


def _find(leader: dict[int, int], op: int) -> int:
    while leader[op] != op:
        leader[op] = leader[leader[op]]
        op = leader[op]
    return op


def _join(leader: dict[int, int], first: int, second: int) -> None:
    a, b = _find(leader, first), _find(leader, second)
    leader[max(a, b)] = min(a, b)
