"""Candidate regions of a trace: module calls, with the values inside and who needs them in backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from trainfit.operators.collectives import collective_kind
from trainfit.planning.groups import Group, groups_of, values_read
from trainfit.planning.model_calls import own_ops
from trainfit.planning.region_flow import RegionFlow, flow_of
from trainfit.planning.unit_gathers import NOTHING, Gathers, gathers_again
from trainfit.planning.weight_casts import is_kept_by_autocast
from trainfit.plans.recomputation import copied_before_write
from trainfit.traces.trace import Interval, Trace

_ONCE = ("send", "recv", "barrier")
"""Between ranks that need not run the same code: nobody would be there for a message that is repeated."""


@dataclass(frozen=True)
class RegionGraph:
    """One module call, or several in a row, as a graph of groups, in the order of their first op."""

    calls: tuple[int, ...]
    module: int
    start: int
    end: int
    backward_start: int
    release: int
    """When autograd has let go of everything that was saved inside: the inputs are held until then."""
    saved: dict[int, tuple[Interval, ...]]
    """The holds of autograd that checkpointing the region removes, by storage."""
    flow: RegionFlow
    """The same ops as the executor will see them."""
    groups: tuple[Group, ...] = ()
    group_of_op: dict[int, int] = field(default_factory=dict)
    inputs: tuple[int, ...] = ()
    """Storages made during the step before the region, and read inside."""
    casts: frozenset[int] = frozenset()
    """Weights that autocast had cast before, which are cast again with the region: not among the inputs."""
    ends: dict[int, int | None] = field(default_factory=dict)
    """When each storage that it makes, reads or saves would die without these holds; None: after the step."""
    released: dict[int, int] = field(default_factory=dict)
    """When autograd lets go of what was saved inside, if that was recomputed."""
    first_unpack: int = -1
    """The first op of backward that needs something saved inside."""
    overwritten: tuple[tuple[int, int], ...] = ()
    """Copies of what the region overwrites and has to read again: since which op, and their bytes."""
    gathers: Gathers = NOTHING
    """What units of FSDP inside of it gather when it is recomputed."""

    @property
    def call(self) -> int:
        """The first of its calls."""
        return self.calls[0]

    @property
    def freeable_bytes(self) -> int:
        """What autograd saved inside and would not have to keep if everything were recomputed."""
        return sum(group.bytes for group in self.groups if group.needed)

    @property
    def ops(self) -> Sequence[int]:
        """The ops of its forward, without what units of FSDP inside do around theirs."""
        return self.flow.ops

    @property
    def last_save(self) -> int:
        """When autograd saves something inside for the last time: it is recomputed up to there."""
        return max((hold.start for holds in self.saved.values() for hold in holds), default=self.start)


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
    until = max((backward_start, *(_end(hold.end) for hold in others)))
    return others + [hold for hold in left if hold.holder == "program" and hold.start < until]


def end_without_saves(trace: Trace, number: int, regions: Sequence[RegionGraph]) -> int | None:
    """Return when a storage would die had autograd saved nothing inside the regions; None: after the step."""
    if len(regions) == 1:
        return regions[0].ends[number]
    return _last_end(trace, number, remaining_holds(trace, number, regions))


def _last_end(trace: Trace, number: int, holds: list[Interval]) -> int | None:
    last = max((_end(hold.end) for hold in holds), default=trace.storages[number].start + 1)
    return None if last == _BEYOND else last


def region_graph(trace: Trace, call_number: int, op_seconds: list[float]) -> RegionGraph | None:
    """Return the graph of a module call, or None if it cannot be a region."""
    return chain_graph(trace, (call_number,), op_seconds)


def chain_graph(trace: Trace, calls: tuple[int, ...], op_seconds: list[float]) -> RegionGraph | None:
    """Return the graph of calls in a row, or None if they cannot be a region.

    What one of them hands to the next is needed: the next one is recomputed from it.
    """
    first, last = trace.calls[calls[0]], trace.calls[calls[-1]]
    start, end = first.body.start, last.body.stop
    if any(trace.calls[n].recompute or trace.calls[n].backward_start < 0 for n in calls) or end <= start:
        return None
    if any(trace.ops[op].phase != "forward" for op in range(start, end)):
        return None
    if any(collective_kind(trace.op_name(op)) in _ONCE for op in range(start, end)):
        return None
    if any(op.recompute for op in trace.ops[last.backward_start : first.backward_end]):
        # The step has a checkpoint of its own in there; what that holds the second time is not in the trace.
        return None
    ops = own_ops(trace, range(start, end))
    saved = saved_inside(trace, ops, end, last.backward_start) if ops else {}
    if not saved:
        return None
    ends = [hold.end for holds in saved.values() for hold in holds]
    release = max(len(trace.ops) if end is None else end for end in ends)
    for before, after in itertools.pairwise(calls):
        handed = handed_on(trace, before, after)
        if handed is None:
            return None
        saved.setdefault(handed, ())
    region = RegionGraph(
        calls, first.module, start, end, last.backward_start, release, saved, flow_of(trace, calls, saved)
    )
    region = _with_groups(trace, region, op_seconds)
    gathers = gathers_again(trace, calls, region.first_unpack, region.last_save)
    # Each call of several casts for itself, which one copy of the cast would not tell; nor are casts and
    # gathers put in order here.
    if gathers is None or (region.casts and (len(calls) > 1 or gathers.ops)):
        return None
    return replace(region, gathers=gathers)


def handed_on(trace: Trace, before: int, after: int) -> int | None:
    """Return the storage that a call hands to the call that follows it, if that is all it hands to anyone."""
    call, following = trace.calls[before], trace.calls[after]
    if call.body.stop != following.body.start:
        return None
    used = {
        storage
        for op in trace.ops[call.body.start : call.body.stop]
        for storage in op.creates
        for reader in trace.readers[storage]
        if reader >= call.body.stop and trace.ops[reader].phase == "forward"
    }
    return used.pop() if len(used) == 1 else None


def saved_inside(
    trace: Trace, ops: Sequence[int], end: int, backward_start: int
) -> dict[int, tuple[Interval, ...]]:
    """Return the holds of autograd that begin inside the region, which has these ops.

    A result of the last op is saved at the same time as an argument of the op that follows the region; what
    follows is released before the region's backward begins.
    """
    found: dict[int, tuple[Interval, ...]] = {}
    start, rows = ops[0], [trace.ops[number] for number in ops]
    touched = (storage for op in rows for storage in (*op.reads, *op.writes, *op.creates))
    for number in dict.fromkeys(touched):
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


def _with_groups(trace: Trace, region: RegionGraph, op_seconds: list[float]) -> RegionGraph:
    """Return the region with what it reads and the groups of its ops."""
    ops = [trace.ops[number] for number in region.ops]
    made = dict.fromkeys(storage for op in ops for storage in op.creates)
    read = dict.fromkeys(storage for op in ops for storage in op.reads if storage not in made)
    inputs = [storage for storage in read if not trace.storages[storage].persistent]
    casts = frozenset(storage for storage in inputs if is_kept_by_autocast(trace, storage))
    left = {
        storage: remaining_holds(trace, storage, (region,))
        for storage in {*made, *inputs, *region.saved}
        if not trace.storages[storage].persistent
    }
    writing_outside = {number for number, op in zip(region.ops, ops) if not made.keys() >= set(op.writes)}
    groups = groups_of(
        trace,
        region.ops,
        sizes={storage: _kept_bytes(trace, region, storage, left[storage]) for storage in made},
        saved=region.saved.keys(),
        once=writing_outside | _reading_what_is_lost(trace, region),
        op_seconds=op_seconds,
    )
    return replace(
        region,
        groups=groups,
        group_of_op={op: number for number, group in enumerate(groups) for op in group.ops},
        inputs=tuple(storage for storage in inputs if storage not in casts),
        casts=casts,
        ends={storage: _last_end(trace, storage, holds) for storage, holds in left.items()},
        released={
            storage: max(_node_end(trace, hold, storage) for hold in holds)
            for storage, holds in region.saved.items()
            if holds
        },
        first_unpack=_first_unpack(trace, region),
        overwritten=tuple(_overwritten(trace, region)),
    )


def _reading_what_is_lost(trace: Trace, region: RegionGraph) -> set[int]:
    """Return the ops that read what is overwritten between the region and its backward.

    That may be an input, or a buffer that the next call of the same module moves on.
    """
    lost = {storage for op in trace.ops[region.end : region.backward_start] for storage in op.writes}
    if not lost:
        return set()
    lost -= {storage for op in region.ops for storage in trace.ops[op].creates}
    # Parameters that are gathered again are what they were.
    lost = {storage for storage in lost if not trace.storages[storage].gathered}
    return {number for number in region.ops if lost.intersection(values_read(trace, number))}


def _kept_bytes(trace: Trace, region: RegionGraph, number: int, left: list[Interval]) -> int:
    """Return what keeping a storage costs: nothing if someone outside holds it until backward anyway."""
    if any(hold.start <= region.end and _end(hold.end) > region.backward_start for hold in left):
        return 0
    return trace.occupied_bytes[number]


def _end(end: int | None) -> int:
    """Return an end that can be compared: beyond the step is later than everything."""
    return _BEYOND if end is None else end


_BEYOND = 1 << 60


def _first_unpack(trace: Trace, region: RegionGraph) -> int:
    """Return the first op of backward that needs something saved inside the region."""
    inside = range(region.start, region.end)
    for number in range(region.backward_start, len(trace.ops)):
        op = trace.ops[number]
        if op.exchange or op.forward_op not in inside:
            continue
        if any(storage in region.saved for storage in op.reads):
            return number
    return region.backward_start


def _overwritten(trace: Trace, region: RegionGraph) -> Iterator[tuple[int, int]]:
    """Yield the copies of what was there before the region and is read in it before it is overwritten."""
    made: set[int] = set()
    read: set[int] = set()
    for number in region.ops:
        op = trace.ops[number]
        for storage in op.writes:
            copied = copied_before_write(was_read=storage in read, makes_more=bool(op.creates))
            if copied and storage not in made:
                yield number, trace.storages[storage].bytes
            read.discard(storage)
        made.update(op.creates)
        read.update(storage for storage in op.reads if storage not in op.writes)


_REDUCED = "aten.sum.dim_IntList"


def _node_end(trace: Trace, hold: Interval, number: int) -> int:
    """Return when the node of autograd that a storage was rebuilt for lets go of it.

    What autograd itself saved stays until the node's gradients have been reduced to the shape of the inputs
    they belong to (a sum that keeps its dimensions, and a view). What was rebuilt is gone before that.
    """
    if hold.end is None:
        return len(trace.ops)
    last = hold.end - 1
    while last > 0 and trace.op_name(last) in (_REDUCED, "aten.view.default"):
        last -= 1
    tail = trace.ops[last + 1 : hold.end]
    if not tail or trace.op_name(last + 1) != _REDUCED:
        return hold.end
    first = trace.signatures[tail[0].signature]
    keeps_dimensions = len(first.inputs[0].shape) == len(first.outputs[0].shape)
    same_node = all(op.forward_op == trace.ops[last].forward_op for op in tail)
    rebuilt = keeps_dimensions and same_node and not any(number in op.reads for op in tail)
    return last + 1 if rebuilt else hold.end
