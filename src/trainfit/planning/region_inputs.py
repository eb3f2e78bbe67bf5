"""Inputs of a region that can be in the host's memory between its forward and its backward.

An input is held for the recomputation, unless it is copied to the host. Then its memory is free only if
nobody else holds it: no Python variable, nothing that autograd saved elsewhere, and no other region for which
it is an input, too. In a curve (`offload_curves.py`) an input is a group of no ops that is always needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainfit.operators.names import is_operator
from trainfit.operators.value_use import SHOW_VALUES
from trainfit.planning.groups import Group, values_read
from trainfit.planning.host_copies import CopyWindow
from trainfit.planning.minimum_cut import Choice
from trainfit.planning.regions import RegionGraph
from trainfit.plans.plan import InputPlace
from trainfit.traces.ranks import COPIES
from trainfit.traces.trace import Trace


@dataclass(frozen=True, slots=True)
class HostInput:
    """An input that can be on the host."""

    storage: int
    place: InputPlace
    bytes: int


def inputs_for_host(trace: Trace, region: RegionGraph, window: CopyWindow) -> tuple[HostInput, ...]:
    """Return the inputs whose memory is free between the copies, if they are copied to the host."""
    if _has_tensors_in_parts(trace):
        return ()
    found = []
    for storage in region.inputs:
        place = _place(trace, region, storage)
        if place is not None and _is_free_meanwhile(trace, region, window, storage):
            found.append(HostInput(storage, place, trace.occupied_bytes[storage]))
    return tuple(found)


def _has_tensors_in_parts(trace: Trace) -> bool:
    """Whether activations may be distributed tensors, whose parts cannot be taken away one by one."""
    cluster = trace.cluster
    return cluster is not None and any(name not in COPIES for name, _ in cluster.mesh or cluster.own_mesh)


def _place(trace: Trace, region: RegionGraph, storage: int) -> InputPlace | None:
    """Return where an input is first read by an op that is followed when the plan runs."""
    for position, number in enumerate(region.ops):
        op, signature = trace.ops[number], trace.signatures[trace.ops[number].signature]
        followed = is_operator(signature.name) and signature.name not in SHOW_VALUES and not signature.view
        if followed and storage in values_read(trace, number):
            return InputPlace(position, op.reads.index(storage))
    return None


def input_at(trace: Trace, region: RegionGraph, place: InputPlace) -> int | None:
    """Return the input that is read at a place; None if there is none."""
    if place.op >= len(region.ops):
        return None
    reads = trace.ops[region.ops[place.op]].reads
    storage = reads[place.argument] if place.argument < len(reads) else -1
    return storage if storage in region.inputs else None


def _is_free_meanwhile(trace: Trace, region: RegionGraph, window: CopyWindow, number: int) -> bool:
    """Whether nobody holds an input from the end of the copy to where it is fetched."""
    storage, end = trace.storages[number], region.ends[number]
    if storage.producer < 0 or storage.resizes or storage.gathered or not trace.occupied_bytes[number]:
        return False
    if end is None or end >= window.fetched or window.freed >= window.fetched:
        return False
    if _may_be_saved_by_its_maker(trace, region, number):
        return False
    own = set(region.ops)
    for position in trace.readers[number]:
        if position >= region.start and number in trace.ops[position].writes:
            return False
        if position not in own and _another_may_hold(trace, region, own, position, number):
            return False
    return True


def _may_be_saved_by_its_maker(trace: Trace, region: RegionGraph, number: int) -> bool:
    """Whether what autograd saved when the region began is a result of the op before it."""
    at_once = any(hold.start == region.start for hold in region.saved.get(number, ()))
    return at_once and number not in trace.ops[region.start].reads


def _another_may_hold(trace: Trace, region: RegionGraph, own: set[int], position: int, storage: int) -> bool:
    """Whether an op outside of the region shows that someone else holds the storage.

    In backward that is who saved it outside; in forward another possible region, whose input it is, too.
    """
    if trace.ops[position].phase != "forward":
        return trace.ops[position].forward_op not in own
    producer, number = trace.storages[storage].producer, trace.ops[position].call
    while number >= 0:
        call = trace.calls[number]
        if producer in call.body:
            return False
        if not (call.body.start <= region.start and region.end <= call.body.stop):
            return True
        number = call.parent
    return False


def with_inputs(groups: Sequence[Group], inputs: Sequence[HostInput]) -> tuple[Group, ...]:
    """Return the groups of a region and, after them, its inputs: each is kept, or copied to the host."""
    needed = Group((), frozenset(), (), (), 0.0, (True,), keepable=True, repeatable=False)
    return (*groups, *(replace(needed, storages=(i.storage,), sizes=(i.bytes,)) for i in inputs))


def without_inputs(choice: Choice, inputs: Sequence[HostInput], groups: int) -> Choice:
    """Return a choice about groups with inputs as one about the groups alone, which come first."""
    moved = (inputs[number - groups].place for number in sorted(choice.offloaded) if number >= groups)
    return replace(
        choice,
        kept=frozenset(number for number in choice.kept if number < groups),
        offloaded=frozenset(number for number in choice.offloaded if number < groups),
        host_inputs=tuple(moved),
    )
