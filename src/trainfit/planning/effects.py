"""What checkpointing one region does to memory: what dies earlier, what is made again, what is held longer.

Times are ops of the original trace. The recomputation is a segment of its own before `insert`, the first op
of backward that unpacks something saved inside the region; a `Moment` is a time of the original trace, or a
position within the segment.

- A hold of autograd that begins inside the region vanishes: what is not kept dies when Python lets go of it.
- The region's inputs are held until autograd has released everything that was saved inside.
- A kept result is held until the segment, where it takes the place of its recomputation.
- A repeated op makes its results again; they live as they did in forward, and those that autograd saved
  until it releases them.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainfit.planning.minimum_cut import Choice
from trainfit.planning.regions import RegionGraph
from trainfit.trace import Trace

SEGMENT_END = 1 << 60
"""A position after every op of the segment."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Before the op at `time` of the original trace, or, at the insertion, a position in the segment."""

    time: int
    position: int = -1
    """-1: outside of the segment."""


@dataclass(frozen=True)
class Effect:
    """The changes to the trace that one region makes."""

    region: RegionGraph
    choice: Choice
    insert: int
    segment: tuple[int, ...]
    """Ops of the original forward that run again, in order."""
    ends: dict[int, Moment | None]
    """Storages with another end than before; None is beyond the step."""
    copies: dict[int, tuple[int, Moment]]
    """Storages that are made again: at which position of the segment, and when the copy dies."""


def effect_of(trace: Trace, region: RegionGraph, choice: Choice) -> Effect:
    """Work out what a region with these choices changes."""
    insert = _first_unpack(trace, region)
    repeated = {op for number in choice.repeated for op in region.groups[number].ops}
    segment = tuple(op for op in region.ops if op in repeated)
    kept = {s for number in choice.kept for s in region.groups[number].storages}
    made_again = {s for op in segment for s in trace.ops[op].creates}
    position_of = {op: position for position, op in enumerate(segment)}
    ends: dict[int, Moment | None] = {}
    copies: dict[int, tuple[int, Moment]] = {}
    touched = dict.fromkeys((*region.saved, *kept, *made_again, *region.inputs))
    for number in touched:
        storage = trace.storages[number]
        if storage.persistent:
            continue
        end = _end_without_saves(trace, region, number)
        if number in kept:
            end = _later(end, _release(trace, region, number, segment, insert))
        if number in region.inputs:
            end = _later(end, Moment(region.release))
        original = None if storage.end is None else Moment(storage.end)
        if end != original:
            ends[number] = end
        if number in made_again:
            made = position_of[storage.producer]
            copies[number] = (made, _release(trace, region, number, segment, insert))
    return Effect(region, choice, insert, segment, ends, copies)


def _first_unpack(trace: Trace, region: RegionGraph) -> int:
    """Return the first op of backward that needs something saved inside the region."""
    inside = range(region.start, region.end)
    for number in range(region.backward_start, len(trace.ops)):
        op = trace.ops[number]
        if op.forward_op in inside and any(storage in region.saved for storage in op.reads):
            return number
    return region.backward_start


def _end_without_saves(trace: Trace, region: RegionGraph, number: int) -> Moment | None:
    """Return when a storage would die if autograd had saved nothing inside the region."""
    storage = trace.storages[number]
    left = [hold.end for hold in region.other_holds(trace, number)]
    if any(end is None for end in left):
        return None
    return Moment(max((end for end in left if end is not None), default=storage.start + 1))


def _release(trace: Trace, region: RegionGraph, number: int, segment: tuple[int, ...], insert: int) -> Moment:
    """Return when what was made again or taken from the cache dies: with autograd, else as in forward."""
    saved = region.saved.get(number)
    if saved:
        ends = [len(trace.ops) if hold.end is None else hold.end for hold in saved]
        return Moment(max(ends))
    python_end = max(
        (
            region.end if hold.end is None else hold.end
            for hold in trace.storages[number].held_by("program")
            if hold.start < region.end
        ),
        default=region.end,
    )
    if python_end >= region.end:
        return Moment(insert, SEGMENT_END)
    return Moment(insert, sum(1 for op in segment if op < python_end))


def _later(first: Moment | None, second: Moment | None) -> Moment | None:
    if first is None or second is None:
        return None
    return max(first, second, key=_order)


def _order(moment: Moment) -> tuple[int, int]:
    # The segment comes before the op at its insertion, and after whatever dies there.
    return (moment.time, moment.position)
