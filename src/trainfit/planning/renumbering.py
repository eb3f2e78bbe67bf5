"""Where the ops of a trace are when regions insert others between them: recomputation, and copies."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from trainfit.planning.effects import Effect, Moment
from trainfit.traces.trace import Trace


class InsertedPart(IntEnum):
    """What an effect inserts, in the order in which it comes at one place."""

    COPY_OUT = 0
    COPY_BACK = 1
    SEGMENT = 2


def _insertions(effects: Sequence[Effect]) -> list[tuple[int, InsertedPart, Effect]]:
    """Return what is inserted before which op of the original trace, in order."""
    found = [(effect.insert, InsertedPart.SEGMENT, effect) for effect in effects]
    for effect in effects:
        if effect.host is not None:
            found.append((effect.region.end, InsertedPart.COPY_OUT, effect))
            found.append((effect.host.window.fetched, InsertedPart.COPY_BACK, effect))
    return sorted(found, key=lambda one: (one[0], one[1], one[2].region.start))


def _length(part: InsertedPart, effect: Effect) -> int:
    return len(effect.segment) if part is InsertedPart.SEGMENT else len(effect.fetched)


class Renumbering:
    """Where the ops of the original trace, of the segments and of copies are in the new one."""

    def __init__(self, trace: Trace, effects: Sequence[Effect]) -> None:
        self.insertions = _insertions(effects)
        self._gone = sorted(op for effect in effects for op in effect.moved.ops)
        self._ops = len(trace.ops)
        self._inserts = [at for at, _, _ in self.insertions]
        self._before = [0]
        self.first_op: dict[tuple[InsertedPart, int], int] = {}
        """Where what is inserted begins: by what it is, and where its region begins in the original."""
        for at, part, effect in self.insertions:
            gone = bisect.bisect_left(self._gone, at)
            self.first_op[part, effect.region.start] = at + self._before[-1] - gone
            self._before.append(self._before[-1] + _length(part, effect))
        self._shift = np.array(self._before, dtype=np.int64)
        self.segment_start = {
            start: op for (part, start), op in self.first_op.items() if part is InsertedPart.SEGMENT
        }
        self.ordered = [effect for _, part, effect in self.insertions if part is InsertedPart.SEGMENT]
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
