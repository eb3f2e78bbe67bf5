"""What an allocator is asked for under a plan, without writing the plan's trace: quick enough to try many.

`rewrite.py` writes the trace of a step with regions; its requests are those found here. Only what decides
about memory is worked out, with the storages of the step as columns (`allocator/step_columns.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trainfit.allocator.step_columns import NEVER, Numbers, StepColumns, columns_of, filling_rows
from trainfit.devices.device_table import Device
from trainfit.devices.library_handles import LibraryWorkspace, library_workspaces
from trainfit.planning.edits import InsertedPart
from trainfit.planning.effects import Effect, ends_of
from trainfit.planning.renumbering import Renumbering
from trainfit.traces.trace import Trace


@dataclass(frozen=True)
class _Segment:
    """What runs again for one region, in columns: storages that are made again, workspaces, what is held."""

    made: Numbers
    """The position in the segment at which each storage is made."""
    sizes: Numbers
    until: Numbers
    """The time at which it is freed, of the original trace."""
    until_position: Numbers
    """The position at which it is freed, or -1 if `until` says it."""
    streams: Numbers
    workspace_positions: Numbers
    workspace_sizes: Numbers


@dataclass
class PlannedColumns:
    """The columns of one step under any plan."""

    trace: Trace
    device: Device
    _base: StepColumns | None = field(init=False)
    _libraries: tuple[LibraryWorkspace, ...] = field(init=False)
    _filling_rows: dict[tuple[int, int], int] = field(init=False)
    _segments: dict[int, tuple[Effect, _Segment]] = field(default_factory=dict)
    """By the identity of the effect, which is kept with it."""

    def __post_init__(self) -> None:
        """Make the columns of the step without a plan."""
        self._base = columns_of(self.trace)
        self._libraries = library_workspaces(self.trace, self.device)
        self._filling_rows = filling_rows(self.trace)

    def of(self, effects: Sequence[Effect]) -> StepColumns | None:
        """Return the columns of the step with these regions; None if it has no columns."""
        base = self._base
        if base is None:
            return None
        new = Renumbering(self.trace, effects)
        start, end = new.starts(base.start), np.where(base.end == NEVER, NEVER, new.ends(base.end))
        # What is emptied at some time is so after what runs again there, as what is filled.
        filled = slice(*base.fillings)
        end[filled] = new.starts(base.end[filled])
        for number, moment, effect in ends_of(self.trace, effects):
            time = new.after(moment, effect)
            end[number] = NEVER if time is None else max(time, int(start[number]) + 1)
        workspace_ops = new.starts(base.workspace_ops)
        for effect in effects:
            self._move(effect, new, (start, end, workspace_ops))
        starts, ends, sizes, streams = [start], [end], [base.sizes], [base.streams]
        ops, workspaces = [workspace_ops], [base.workspace_sizes]
        for effect in effects:
            segment, first = self._segment(effect, base), new.segment_start[effect.region.start]
            made = first + segment.made
            inside = first + np.minimum(segment.until_position, len(effect.segment))
            freed = np.where(segment.until_position < 0, new.ends(segment.until), inside)
            starts.append(made)
            ends.append(np.maximum(freed, made + 1))
            sizes.append(segment.sizes)
            streams.append(segment.streams)
            ops.append(first + segment.workspace_positions)
            workspaces.append(segment.workspace_sizes)
            if effect.fetched:
                back = new.first_op[InsertedPart.COPY_BACK, effect.region.start] + np.arange(
                    len(effect.fetched)
                )
                until = [new.after(moment, effect) for moment in effect.fetched.values()]
                starts.append(back)
                ends.append(np.maximum(np.array(until, dtype=np.int64), back + 1))
                sizes.append(base.sizes[list(effect.fetched)])
                streams.append(base.streams[list(effect.fetched)])
        for effect in effects:
            held = [
                (new.since(edit.since, effect), new.after(edit.until, effect), edit.bytes)
                for edit in effect.held
            ]
            for column, values in zip((starts, ends, sizes), zip(*held)):
                column.append(np.array(values, dtype=np.int64))
        more = sum(len(column) for column in starts[1:])
        streams.append(np.zeros(more - sum(map(len, streams[1:])), dtype=np.int64))
        unseen, count = len(self.trace.releases), len(base.start)
        return replace(
            base,
            start=np.concatenate(starts),
            end=np.concatenate(ends),
            sizes=np.concatenate(sizes),
            born=np.concatenate([np.where(base.born < 0, -1, new.starts(base.born)), np.full(more, -1)]),
            turn=np.concatenate([base.turn, unseen + np.arange(count, count + more)]),
            workspace_ops=np.concatenate(ops),
            workspace_sizes=np.concatenate(workspaces),
            streams=np.concatenate(streams),
            kept=self._kept(new),
        )

    def _move(self, effect: Effect, new: Renumbering, columns: tuple[Numbers, Numbers, Numbers]) -> None:
        """Let units of FSDP be gathered in the segment: changes columns of starts, ends and workspaces."""
        (start, end, workspace_ops), moved = columns, effect.moved
        assert self._base is not None
        first = new.segment_start[effect.region.start]
        for number, position in moved.starts.items():
            start[number] = first + position
        for number, position in moved.ends.items():
            end[number] = max(first + position, int(start[number]) + 1)
        for which, position in moved.filled.items():
            start[self._filling_rows[which]] = first + position
        for op, position in moved.ops.items():
            workspace_ops[self._base.workspace_ops == op] = first + position

    def _kept(self, new: Renumbering) -> tuple[tuple[int, int], ...]:
        """Return what libraries keep; what runs again may be the first of backward that needs it."""
        found = {one.name: (new.start(one.first_op), one.bytes) for one in self._libraries}
        for effect in new.ordered:
            first = new.segment_start[effect.region.start]
            if found and first > max(found.values())[0]:
                break
            again = tuple(replace(self.trace.ops[op], phase="backward") for op in effect.segment)
            for one in library_workspaces(replace(self.trace, ops=again), self.device):
                found[one.name] = min(found.get(one.name, (NEVER, 0)), (first + one.first_op, one.bytes))
        return tuple(sorted(found.values()))

    def _segment(self, effect: Effect, base: StepColumns) -> _Segment:
        """Return the columns of a region's segment, which are made once."""
        found = self._segments.get(id(effect))
        if found is None:
            found = self._segments[id(effect)] = (effect, _segment_of(self.trace, effect, base))
        return found[1]


def _segment_of(trace: Trace, effect: Effect, base: StepColumns) -> _Segment:
    workspaces = [
        0 if op in effect.moved.ops else trace.signatures[trace.ops[op].signature].workspace_bytes
        for op in effect.segment
    ]
    used = np.flatnonzero(workspaces)
    copies = [
        (again.at.position, trace.storages[number].bytes, again.until.time, again.until.position)
        for number, again in effect.copies.items()
    ]
    made, sizes, until, position = np.array(copies, dtype=np.int64).reshape(-1, 4).T
    return _Segment(
        made,
        sizes,
        until,
        position,
        base.streams[list(effect.copies)],
        used,
        np.array(workspaces, dtype=np.int64)[used],
    )
