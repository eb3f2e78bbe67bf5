"""Where the ops of a trace are when regions insert others between them: recomputation, and copies."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainfit.planning.edits import InsertedPart, InsertOps, Moment
from trainfit.planning.effects import Effect
from trainfit.traces.trace import Trace


def _insertions(effects: Sequence[Effect]) -> list[tuple[InsertOps, Effect]]:
    """Return what is inserted, in order."""
    found = [(edit, effect) for effect in effects for edit in effect.insertions]
    return sorted(found, key=lambda one: (one[0].at, one[0].part, one[1].region.start))


class Renumbering:
    """Where the ops of the original trace, of the segments and of copies are in the new one."""

    def __init__(self, trace: Trace, effects: Sequence[Effect]) -> None:
        self.insertions = _insertions(effects)
        self._gone = sorted(op for effect in effects for op in effect.moved.ops)
        self._ops = len(trace.ops)
        self._inserts = [edit.at for edit, _ in self.insertions]
        self._before = [0]
        self.first_op: dict[tuple[InsertedPart, int], int] = {}
        """Where what is inserted begins: by what it is, and where its region begins in the original."""
        for edit, effect in self.insertions:
            gone = bisect.bisect_left(self._gone, edit.at)
            self.first_op[edit.part, effect.region.start] = edit.at + self._before[-1] - gone
            self._before.append(self._before[-1] + len(edit.rows))
        self._shift = np.array(self._before, dtype=np.int64)
        self.segment_start = {
            start: op for (part, start), op in self.first_op.items() if part is InsertedPart.SEGMENT
        }
        self.ordered = [effect for edit, effect in self.insertions if edit.part is InsertedPart.SEGMENT]
        self.moved_to = {
            op: self.segment_start[effect.region.start] + position
            for effect in effects
            for op, position in effect.moved.ops.items()
        }
        """Where the ops are that have moved into a segment."""
        self.first_insert = min(self._inserts, default=len(trace.ops))

    @property
    def ops(self) -> int:
        """How many ops there are in the new trace."""
        return self._ops + self._before[-1] - len(self._gone)

    def start(self, time: int) -> int:
        """Return the new number of an op: after the segments that are inserted before it; -1 stays -1.

        Of one that has moved, that is the number of the op that follows at its old place.
        """
        gone = bisect.bisect_left(self._gone, time)
        return time + self._before[bisect.bisect_right(self._inserts, time)] - gone

    def number(self, op: int) -> int:
        """Return the new number of an op, also of one that has moved."""
        moved = self.moved_to.get(op)
        return self.start(op) if moved is None else moved

    def waited_for(self, op: int) -> int:
        """Return the new number of an op that another waits for; those of the step before are negative."""
        return self.number(op) if op >= 0 else self.number(op + self._ops) - self.ops

    def end(self, time: int) -> int:
        """Return the new time of a release before an op: before the segments that are inserted there."""
        if time <= 0:
            return self.start(time)
        gone = bisect.bisect_left(self._gone, time)
        return time + self._before[bisect.bisect_left(self._inserts, time)] - gone

    def starts(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return `start` of many."""
        shift = self._shift[np.searchsorted(self._inserts, times, side="right")]
        found: NDArray[np.int64] = times + shift - np.searchsorted(self._gone, times)
        return found

    def ends(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return `end` of many."""
        shift = self._shift[np.searchsorted(self._inserts, times, side="left")]
        found = times + shift - np.searchsorted(self._gone, times)
        return np.where(times > 0, found, self.starts(times))

    def after(self, moment: Moment | None, effect: Effect) -> int | None:
        """Return the new time of a moment; a position is one in the segment of `effect`."""
        if moment is None:
            return None
        if moment.position < 0:
            return self.end(moment.time)
        if moment.time != effect.insert:
            return self.start(moment.time)
        return self.segment_start[effect.region.start] + min(moment.position, len(effect.segment))

    def since(self, moment: Moment, effect: Effect) -> int:
        """Return the new time of something that begins at a moment: after what is inserted there."""
        if moment.position < 0:
            return self.start(moment.time)
        return self.segment_start[effect.region.start] + moment.position
