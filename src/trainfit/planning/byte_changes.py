"""The bytes that a region changes, moment by moment: what its edits mean to the master problem."""

from __future__ import annotations

from collections.abc import Iterator

from trainfit.planning.edits import SEGMENT_END, HoldBytes, MakeAgain, Moment
from trainfit.planning.effects import Effect
from trainfit.traces.trace import Trace


def byte_changes(trace: Trace, effect: Effect) -> Iterator[tuple[Moment, int]]:
    """Yield when a region allocates on the device, or frees what it would not have, negative, and how much.

    What is fetched where the region is recomputed is there before the segment.
    """
    occupied, end_of_step = trace.occupied_bytes, Moment(len(trace.ops))
    for number, at in effect.ends.items():
        storage = trace.storages[number]
        yield end_of_step if storage.end is None else Moment(storage.end), occupied[number]
        yield end_of_step if at is None else max(at, Moment(storage.start + 1)), -occupied[number]
    for edit in effect.edits:
        if isinstance(edit, MakeAgain):
            size, at = occupied[edit.storage], edit.at
            if at == Moment(effect.insert):
                at = Moment(effect.insert, 0)
            yield at, size
            # It is there for one op at least, and what is freed before it was made is there for all of them.
            until = max(edit.until, Moment(at.time, at.position + 1 if at.position >= 0 else -1))
            yield until if edit.until > Moment(at.time) else Moment(at.time, SEGMENT_END), -size
        elif isinstance(edit, HoldBytes):
            yield edit.since, trace.memory.occupied(edit.bytes)
            yield min(edit.until, end_of_step), -trace.memory.occupied(edit.bytes)
    yield from _moved_bytes(trace, effect)


def _moved_bytes(trace: Trace, effect: Effect) -> Iterator[tuple[Moment, int]]:
    """Yield what is allocated or freed in the segment instead of in backward."""
    moved, insert = effect.moved, effect.insert
    for number, position in moved.starts.items():
        yield Moment(insert, position), trace.occupied_bytes[number]
        yield Moment(trace.storages[number].start), -trace.occupied_bytes[number]
    for number, position in moved.ends.items():
        end = trace.storages[number].end
        assert end is not None
        yield Moment(insert, max(position, moved.starts.get(number, -1) + 1)), -trace.occupied_bytes[number]
        yield Moment(end), trace.occupied_bytes[number]
    for (number, time), position in moved.filled.items():
        size = trace.memory.occupied(dict(trace.storages[number].resizes)[time])
        yield Moment(insert, position), size
        yield Moment(time), -size
