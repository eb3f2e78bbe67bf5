"""Replay a plan on a trace: the trace that the step would have with these regions checkpointed.

The result is an ordinary trace: the same simulation gives its memory and the same schedule its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainfit.planning.edits import InsertedPart, InsertOps
from trainfit.planning.effects import Effect, ends_of
from trainfit.planning.host_copies import copy_signature
from trainfit.planning.renumbering import Renumbering
from trainfit.traces.trace import COMPUTE, Interval, Op, Storage, Trace


def rewritten(trace: Trace, effects: Sequence[Effect]) -> Trace:
    """Return the trace with the regions' recomputation in it; the regions must not overlap."""
    new = Renumbering(trace, effects)
    storages = [_moved(storage, new) for storage in trace.storages]
    for number, end, effect in ends_of(trace, effects):
        storages[number] = _with_end(storages[number], new.after(end, effect))
    for effect in effects:
        _move_gathers(trace, effect, new, storages)
    copies = _copies(trace, effects, new, storages)
    storages += _held(effects, new)
    sizes = copied_sizes(trace, effects)
    return replace(
        trace,
        signatures=(*trace.signatures, *map(copy_signature, sizes)),
        ops=tuple(_ops(trace, effects, new, copies)),
        storages=tuple(storages),
        calls=tuple(
            replace(
                call,
                forward_start=new.start(call.forward_start),
                forward_end=new.end(call.forward_end),
                backward_start=new.start(call.backward_start),
                backward_end=new.end(call.backward_end),
                body_start=new.start(call.body_start),
                body_end=new.end(call.body_end),
            )
            for call in trace.calls
        ),
        observed_peak_bytes=None,
    )


def copied_sizes(trace: Trace, effects: Sequence[Effect]) -> list[int]:
    """Return the distinct sizes of what is copied to the host: each is a signature of its own."""
    copied = (storage for effect in effects if effect.host for storage in effect.host.storages)
    return sorted({trace.storages[storage].bytes for storage in copied})


def _moved(storage: Storage, new: Renumbering) -> Storage:
    if storage.end is not None and storage.end <= new.first_insert:
        return storage  # nothing has moved yet; most storages of forward are gone by then
    # Not `replace`, which takes several times as long: there are thousands.
    return Storage(
        storage.bytes,
        storage.category,
        new.start(storage.producer),
        new.start(storage.start),
        None if storage.end is None else new.end(storage.end),
        tuple([_moved_hold(hold, new) for hold in storage.holders]),
        tuple([(new.start(time), size) for time, size in storage.resizes]),
        new.start(storage.born),
        storage.gathered,
        storage.stream,
        storage.also_used_on,
    )


def _moved_hold(hold: Interval, new: Renumbering) -> Interval:
    start = new.start(hold.start)
    return Interval(hold.holder, start, None if hold.end is None else max(new.end(hold.end), start))


def _with_end(storage: Storage, end: int | None) -> Storage:
    """Return the storage with another end; its holders are summed up, because a plan changes who they are."""
    if end is not None:
        end = max(end, storage.start + 1)
    return replace(storage, end=end, holders=(Interval("program", storage.start, end),))


def _move_gathers(trace: Trace, effect: Effect, new: Renumbering, storages: list[Storage]) -> None:
    """Let units of FSDP be gathered in the segment, and let go of what they need for it there."""
    first, moved = new.segment_start[effect.region.start], effect.moved
    for number in {**moved.starts, **moved.ends}:
        storage = storages[number]
        start = first + moved.starts[number] if number in moved.starts else storage.start
        end = first + moved.ends[number] if number in moved.ends else storage.end
        if end is not None:
            end = max(end, start + 1)
        producer = start if number in moved.starts else storage.producer
        held = (Interval("program", start, end),)
        storages[number] = replace(storage, start=start, producer=producer, end=end, holders=held)
    for number in {number for number, _ in moved.filled}:
        times = [
            first + moved.filled[number, time] if (number, time) in moved.filled else renewed
            for (time, _), (renewed, _) in zip(trace.storages[number].resizes, storages[number].resizes)
        ]
        sizes = [size for _, size in storages[number].resizes]
        storages[number] = replace(storages[number], resizes=tuple(zip(times, sizes)))


def _copies(
    trace: Trace, effects: Sequence[Effect], new: Renumbering, storages: list[Storage]
) -> dict[tuple[int, int], int]:
    """Add the storages that are made again; return their numbers by effect and original storage."""
    numbers: dict[tuple[int, int], int] = {}
    for effect in effects:
        for number, again in effect.copies.items():
            made = new.since(again.at, effect)
            end = new.after(again.until, effect)
            assert end is not None
            end = max(end, made + 1)
            numbers[effect.region.start, number] = len(storages)
            held = (Interval("program", made, end),)
            original = trace.storages[number]
            copy = Storage(original.bytes, "activation", made, made, end, held, stream=original.stream)
            storages.append(copy)
        for position, (number, moment) in enumerate(effect.fetched.items()):
            made = new.first_op[InsertedPart.COPY_BACK, effect.region.start] + position
            end = new.after(moment, effect)
            assert end is not None
            numbers[effect.region.start, number] = len(storages)
            held = (Interval("program", made, max(end, made + 1)),)
            size, stream = trace.storages[number].bytes, trace.storages[number].stream
            storages.append(Storage(size, "activation", made, made, held[0].end, held, stream=stream))
    return numbers


def _held(effects: Sequence[Effect], new: Renumbering) -> Iterator[Storage]:
    """Yield what the executor itself holds, as storages that no operator has made."""
    for effect in effects:
        for edit in effect.held:
            start, end = new.since(edit.since, effect), new.after(edit.until, effect)
            yield Storage(edit.bytes, "activation", -1, start, end, (Interval("program", start, end),))


def _ops(
    trace: Trace, effects: Sequence[Effect], new: Renumbering, copies: dict[tuple[int, int], int]
) -> list[Op]:
    ops: list[Op] = []
    pending = list(reversed(new.insertions))
    waiting = _waits_for_copies(effects, new)
    signature_of = {
        size: len(trace.signatures) + number for number, size in enumerate(copied_sizes(trace, effects))
    }
    # Which effect replaces a storage for the ops of backward that differentiate its region.
    region_of = {op: effect for effect in effects for op in effect.region.ops}
    for number, op in enumerate(trace.ops):
        while pending and pending[-1][0].at == number:
            edit, effect = pending.pop()
            if edit.part is InsertedPart.SEGMENT:
                ops += _segment(trace, effect, new, copies)
            else:
                ops += _copying(trace, effect, edit, new, copies, signature_of)
        if number in new.moved_to:
            continue
        if op.waits_for:
            op = replace(op, waits_for=tuple(new.waited_for(other) for other in op.waits_for))
        effect_here = region_of.get(op.forward_op)
        if effect_here is not None:
            first = effect_here.region.start
            reads = tuple([copies.get((first, storage), storage) for storage in op.reads])
            ops.append(replace(op, reads=reads, forward_op=new.start(op.forward_op)))
        elif op.forward_op >= new.first_insert:
            ops.append(replace(op, forward_op=new.start(op.forward_op)))
        else:
            ops.append(op)
    assert not pending, "every segment has its place"
    for number, others in waiting.items():
        ops[number] = replace(ops[number], waits_for=tuple(sorted({*ops[number].waits_for, *others})))
    return ops


def _waits_for_copies(effects: Sequence[Effect], new: Renumbering) -> dict[int, list[int]]:
    """Return which ops of the new trace wait for copies: they need the memory, or the results."""
    found: dict[int, list[int]] = {}
    for effect in effects:
        if effect.host is None or not effect.host.window.overlaps:
            continue
        begin, length = effect.region.start, len(effect.fetched)
        out, back = new.first_op[InsertedPart.COPY_OUT, begin], new.first_op[InsertedPart.COPY_BACK, begin]
        found.setdefault(new.start(effect.host.window.freed), []).append(out + length - 1)
        found.setdefault(new.segment_start[begin], []).append(back + length - 1)
    return found


def _copying(
    trace: Trace,
    effect: Effect,
    edit: InsertOps,
    new: Renumbering,
    copies: dict[tuple[int, int], int],
    signature_of: dict[int, int],
) -> Iterator[Op]:
    """Yield the copies of a region's results to the host, or back; they wait for what was computed before."""
    out = edit.part is InsertedPart.COPY_OUT
    first, before = new.first_op[edit.part, effect.region.start], new.number(edit.at - 1)
    for position, number in enumerate(edit.rows):
        yield Op(
            signature=signature_of[trace.storages[number].bytes],
            phase="forward" if out else "backward",
            module=effect.region.module,
            call=effect.region.call,
            recompute=False,
            forward_op=-1,
            reads=(number,) if out else (),
            writes=(),
            creates=() if out else (copies[effect.region.start, number],),
            queue=edit.queue,
            waits_for=(before,) if edit.queue != COMPUTE and position == 0 and 0 <= before < first else (),
        )


def _segment(
    trace: Trace, effect: Effect, new: Renumbering, copies: dict[tuple[int, int], int]
) -> Iterator[Op]:
    """Yield the ops that run again; they wait for what runs again with them, the rest is long done."""
    start = new.segment_start[effect.region.start]
    again = {original: start + position for position, original in enumerate(effect.segment)}

    def numbers(storages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(copies.get((effect.region.start, storage), storage) for storage in storages)

    for position, original in enumerate(effect.segment):
        op = trace.ops[original]
        if original in effect.moved.ops:
            yield _gathering(op, trace, effect, new, position)
            continue
        yield replace(
            op,
            phase="backward",
            recompute=True,
            forward_op=-1,
            reads=numbers(op.reads),
            writes=numbers(op.writes),
            creates=numbers(op.creates),
            waits_for=tuple(again[other] for other in op.waits_for if other in again),
        )


def _gathering(op: Op, trace: Trace, effect: Effect, new: Renumbering, position: int) -> Op:
    """Return an op that has moved: it waits for what is done before it now, and not for what follows.

    A unit that begins to gather waits for what was computed so far, as the first of a forward does.
    """
    number = new.segment_start[effect.region.start] + position
    waits = {new.waited_for(other) for other in op.waits_for}
    last = effect.segment[position - 1] if position else effect.insert - 1
    before = trace.ops[last]
    if op.exchange == "gather" and before.exchange != "gather" and before.queue != op.queue:
        waits.add(number - 1 if position else new.number(last))
    return replace(op, forward_op=-1, waits_for=tuple(sorted(other for other in waits if other < number)))
