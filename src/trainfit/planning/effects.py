"""What checkpointing one region does to memory: what is freed earlier, recomputed, and held longer.

Times are ops of the original trace. The recomputation is a segment of its own before `insert`, the first op
of backward that unpacks something saved inside the region; a `Moment` is a time of the original trace, or a
position within the segment.

- Autograd saves nothing inside the region: what is not kept is freed when Python lets go of it.
- The region's inputs are held until autograd has released everything that was saved inside.
- A kept result is held until the segment, where it takes the place of its recomputation.
- A repeated op makes its results again; they live as they did in forward, and those that autograd saved
  until it releases them.
- A result or an input that is copied to the host is held until the copy is done, and made again, by a copy,
  where it is fetched (`host_copies.py`); from the segment on a result is like one that was kept, and an input
  is freed with autograd, or after the segment.
- Units of FSDP inside are gathered in the segment, by ops that have moved there from the backward
  (`unit_gathers.py`).
- What the executor needs besides is held as long as the inputs are: states of random generators, and copies
  of what the region overwrites and has to read again. A region that torch alone recomputes has one state,
  from its beginning.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainfit.operators.memory_use import moves_statistics
from trainfit.planning.edits import (
    NO_MOVE,
    SEGMENT_END,
    Edit,
    FreeAt,
    HoldBytes,
    HoldUntil,
    InsertedPart,
    InsertOps,
    MakeAgain,
    Moment,
    Move,
)
from trainfit.planning.full_recompute import is_full_recompute
from trainfit.planning.groups import values_read
from trainfit.planning.host_copies import CopyWindow, HostCopies, HostLink
from trainfit.planning.minimum_cut import Choice
from trainfit.planning.model_calls import forward_ops
from trainfit.planning.region_inputs import input_at
from trainfit.planning.regions import RegionGraph, end_without_saves
from trainfit.planning.unit_gathers import BEFORE_ALL, Gathers, Place
from trainfit.planning.weight_casts import with_casts
from trainfit.plans.decisions import Decision
from trainfit.traces.trace import COMPUTE, Trace

_ITSELF = 1 << 60
"""Stands for the op of forward at a place, after everything that has moved there."""
_CPU_GENERATOR_BYTES = 5056
"""What `torch.get_rng_state()` returns; the state of a GPU's generator is on the host."""


@dataclass(frozen=True)
class Effect:
    """The changes to the trace that one region makes: a tuple of edits, and what they come from."""

    region: RegionGraph
    choice: Choice
    edits: tuple[Edit, ...]
    by_torch: bool = False
    """Whether torch alone computes it again (`full_recompute.py`)."""
    host: HostCopies | None = None
    """What is copied to the host and fetched again."""

    @property
    def insert(self) -> int:
        """Before which op of the original the region is recomputed."""
        return self.region.first_unpack

    @cached_property
    def insertions(self) -> tuple[InsertOps, ...]:
        """Everything that is inserted."""
        return tuple(edit for edit in self.edits if isinstance(edit, InsertOps))

    @cached_property
    def segment(self) -> tuple[int, ...]:
        """What is inserted to recompute the region."""
        return next(edit.rows for edit in self.insertions if edit.part is InsertedPart.SEGMENT)

    @cached_property
    def until(self) -> dict[int, Moment]:
        """Storages that the region holds, and until when: its inputs, and what it keeps."""
        return {edit.storage: edit.until for edit in self.edits if isinstance(edit, HoldUntil)}

    @cached_property
    def ends(self) -> dict[int, Moment | None]:
        """Storages with another end than before, if this is the only region; None is beyond the step."""
        return {edit.storage: edit.at for edit in self.edits if isinstance(edit, FreeAt)}

    @cached_property
    def copies(self) -> dict[int, MakeAgain]:
        """Storages that are made again in the segment."""
        again = (edit for edit in self.edits if isinstance(edit, MakeAgain))
        return {edit.storage: edit for edit in again if edit.at.position >= 0}

    @cached_property
    def fetched(self) -> dict[int, Moment]:
        """Storages that are fetched from the host, and when the fetched one is freed."""
        again = (edit for edit in self.edits if isinstance(edit, MakeAgain))
        return {edit.storage: edit.until for edit in again if edit.at.position < 0}

    @cached_property
    def held(self) -> tuple[HoldBytes, ...]:
        """What the executor itself holds."""
        return tuple(edit for edit in self.edits if isinstance(edit, HoldBytes))

    @cached_property
    def moved(self) -> Move:
        """What has moved into the segment."""
        return next((edit for edit in self.edits if isinstance(edit, Move)), NO_MOVE)

    @property
    def repeated(self) -> tuple[int, ...]:
        """The ops of the segment that run a second time."""
        return tuple(op for op in self.segment if op < self.insert) if self.moved.ops else self.segment

    def decision(self, op: int) -> Decision:
        """Return what happens to an op of the region."""
        return _decision(self.region, self.choice, op)


def _decision(region: RegionGraph, choice: Choice, op: int) -> Decision:
    group = region.group_of_op[op]
    if group in choice.kept:
        return Decision.SAVE
    if group in choice.offloaded:
        return Decision.OFFLOAD
    again = group in choice.repeated or region.groups[group].free
    return Decision.RECOMPUTE if again else Decision.SKIP


def effect_of(
    trace: Trace,
    region: RegionGraph,
    choice: Choice,
    *,
    by_torch: bool = False,
    copying: tuple[CopyWindow, HostLink] | None = None,
) -> Effect:
    """Work out what a region with these choices changes; `by_torch`: as torch does it, whatever comes out.

    `copying` says where copies to the host run, if the choice has some.
    """
    by_torch = by_torch or is_full_recompute(trace, region, choice)
    first_draws = tuple(region.flow.first_draws(lambda op: _decision(region, choice, op)))
    if by_torch:
        repeated = {op for number in choice.repeated for op in region.groups[number].ops}
    else:
        saved = (storage for number in choice.restored for storage in region.groups[number].storages)
        repeated = region.flow.runs_again(saved, first_draws)
    segment, places = _segment(trace, region, repeated)
    forward = [op for op in segment if op < region.first_unpack]
    read = {storage for op in forward for storage in values_read(trace, op)}
    kept, on_host = (_needed_of(region, groups, read) for groups in (choice.kept, choice.offloaded))
    made_again = {s for op in forward for s in trace.ops[op].creates}
    position_of = {op: position for position, op in enumerate(segment)}
    released = {
        n: _release(trace, region, n, places) for n in {**kept, **on_host} | dict.fromkeys(made_again)
    }
    for number, moment in _inputs_on_host(trace, region, choice):
        released[number], on_host[number] = moment, None
    until = dict.fromkeys(region.inputs, Moment(region.release))
    until |= {number: released[number] for number in kept}
    edits: list[Edit] = [InsertOps(region.first_unpack, InsertedPart.SEGMENT, COMPUTE, segment)]
    made = {
        number: Moment(region.first_unpack, position_of[trace.storages[number].producer])
        for number in made_again
    }
    edits += [MakeAgain(number, at, released[number]) for number, at in made.items()]
    host = None
    if on_host:
        assert copying is not None, "what is offloaded has a place to be copied"
        host = HostCopies(tuple(on_host), *copying)
        until |= dict.fromkeys(on_host, host.freed)
        edits += _copied(region, host, released)
    edits += [HoldUntil(number, moment) for number, moment in until.items()]
    edits += [FreeAt(number, moment) for number, moment in _ends(trace, region, until).items()]
    states = _CPU_GENERATOR_BYTES if trace.device == "cpu" else 0
    held = ((op, states) for op in ((region.start,) if by_torch else first_draws) if states and first_draws)
    edits += [
        HoldBytes(size, Moment(op), Moment(region.release)) for op, size in (*held, *region.overwritten)
    ]
    edits += _held_again(trace, region, segment, by_torch=by_torch)
    if region.gathers.ops:
        edits.append(_moved(region.gathers, position_of, places))
    return Effect(region, choice, tuple(edits), by_torch, host)


def _copied(region: RegionGraph, host: HostCopies, released: dict[int, Moment]) -> Iterator[Edit]:
    """Yield what copies to the host and back change."""
    out, back = host.queues
    yield InsertOps(region.end, InsertedPart.COPY_OUT, out, host.storages)
    yield InsertOps(host.window.fetched, InsertedPart.COPY_BACK, back, host.storages)
    for number in host.storages:
        yield MakeAgain(number, Moment(host.window.fetched), released[number])


def _segment(trace: Trace, region: RegionGraph, repeated: set[int]) -> tuple[tuple[int, ...], list[Place]]:
    """Return what runs until autograd has everything that it saved inside, and the place of each op."""
    stop = min(max(region.last_save, *repeated, -1) + 1, region.end)
    ops = region.ops[: bisect_left(region.ops, stop)]
    again = tuple(with_casts(trace, ops, repeated, region.casts))
    if not region.gathers.ops:
        return again, [(op, _ITSELF) for op in sorted(again)]
    # Casts of weights, which belong to no place of the region, do not occur here.
    places = sorted([*region.gathers.ops, *((op, _ITSELF) for op in again)])
    return tuple(op if moved == _ITSELF else moved for op, moved in places), places


def _moved(gathers: Gathers, position_of: dict[int, int], places: list[Place]) -> Move:
    """Say what moves in positions of the segment."""
    return Move(
        ops={op: position_of[op] for _, op in gathers.ops},
        starts={storage: position_of[op] for storage, op in gathers.starts.items()},
        ends={storage: bisect_left(places, place) for storage, place in gathers.ends.items()},
        filled={which: bisect_left(places, place) for which, place in gathers.filled.items()},
    )


def _ends(trace: Trace, region: RegionGraph, until: dict[int, Moment]) -> dict[int, Moment | None]:
    """Return the storages that have another end if this is the only region; as `ends_of` does for several."""
    found: dict[int, Moment | None] = {}
    for number in dict.fromkeys((*region.saved, *until)):
        storage = trace.storages[number]
        if storage.persistent:
            continue
        time = region.ends[number]
        end = None if time is None else Moment(time)
        held = until.get(number)
        if held is not None and end is not None and end < held:
            end = held
        if end != (None if storage.end is None else Moment(storage.end)):
            found[number] = end
    return found


def ends_of(trace: Trace, effects: Sequence[Effect]) -> Iterator[tuple[int, Moment | None, Effect]]:
    """Yield the storages that have another end with these regions, the end, and whose segment it is about.

    What one region lets go of, another may hold.
    """
    touching: dict[int, list[Effect]] = {}
    for effect in effects:
        for number in dict.fromkeys((*effect.region.saved, *effect.until)):
            touching.setdefault(number, []).append(effect)
    for number, touched_by in touching.items():
        storage = trace.storages[number]
        if storage.persistent:
            continue
        if len(touched_by) == 1 and len(effects) > 1:
            if number in touched_by[0].ends:
                yield number, touched_by[0].ends[number], touched_by[0]
            continue
        time = end_without_saves(trace, number, [effect.region for effect in touched_by])
        end = None if time is None else Moment(time)
        last = touched_by[0]
        for effect in touched_by:
            if number in effect.until and end is not None and end < effect.until[number]:
                end, last = effect.until[number], effect
        if end != (None if storage.end is None else Moment(storage.end)):
            yield number, end, last


def _held_again(
    trace: Trace, region: RegionGraph, segment: tuple[int, ...], *, by_torch: bool
) -> Iterator[HoldBytes]:
    """Yield the state that the generator is put back to, and the statistics that move in a copy."""
    insert = region.first_unpack
    for call in region.calls if trace.device == "cpu" else ():
        ops = set(forward_ops(trace, call))
        again = [(position, op) for position, op in enumerate(segment) if op in ops]
        draws = [position for position, op in again if trace.signatures[trace.ops[op].signature].random]
        if draws:
            since = Moment(insert, 0 if by_torch else draws[0])
            yield HoldBytes(_CPU_GENERATOR_BYTES, since, Moment(insert, again[-1][0] + 1))
    for position, op in enumerate(segment):
        if moves_statistics(trace.op_name(op)):
            persistent = {s for s in trace.ops[op].reads if trace.storages[s].category == "buffer"}
            size = sum(trace.storages[s].bytes for s in persistent)
            yield HoldBytes(size, Moment(insert, position), Moment(insert, position + 1))


def _needed_of(region: RegionGraph, groups: Iterable[int], read: set[int]) -> dict[int, None]:
    """Return what groups make that backward needs, or what runs again reads, in order."""
    made = (storage for number in sorted(groups) for storage in region.groups[number].storages)
    return {storage: None for storage in made if storage in region.saved or storage in read}


def _inputs_on_host(trace: Trace, region: RegionGraph, choice: Choice) -> Iterator[tuple[int, Moment]]:
    """Yield inputs that are copied, and when they are freed again: with autograd, else after the segment."""
    for place in choice.host_inputs:
        number = input_at(trace, region, place)
        if number is not None:
            again = Moment(region.first_unpack, SEGMENT_END)
            yield number, Moment(region.released[number]) if number in region.released else again


def _release(trace: Trace, region: RegionGraph, number: int, places: list[Place]) -> Moment:
    """Return when what was made again or taken from the cache is freed: with autograd, else as in forward.

    `places` are those of the segment's ops, in order.
    """
    if number in region.released:
        return Moment(region.released[number])
    holds = [hold for hold in trace.storages[number].held_by("program") if hold.start < region.end]
    python_end = max((region.end if hold.end is None else hold.end for hold in holds), default=region.end)
    if python_end >= region.end:
        return Moment(region.first_unpack, SEGMENT_END)
    return Moment(region.first_unpack, bisect_left(places, (python_end, BEFORE_ALL)))
