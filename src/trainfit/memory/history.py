"""Bytes by category at any moment of a trace: while an op runs, and between two ops.

What turns out to be a gradient is temporary until it is one. Between two ops, a moment is a time and how many
storages had been released by then (`Trace.releases`); without the latter, all that are released before the
next op are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainfit.traces.trace import CATEGORIES, Trace

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class MemoryHistory:
    """One row per category, one column per op or moment."""

    during: Bytes
    """While each op runs, its results included."""
    _made: Bytes
    """Before each op, what was ever made, at the size and of the category that it has by then."""
    _freed: Bytes
    """What the first releases have freed, for each number of them."""
    _release_times: NDArray[np.int64]
    names: tuple[str, ...] = CATEGORIES
    """Of the rows."""

    @property
    def totals(self) -> Bytes:
        """All categories together, while each op runs."""
        total: Bytes = self.during.sum(axis=0)
        return total

    def at(self, time: int, releases: int | None = None) -> dict[str, int]:
        """Return the bytes before op number `time`, when so many storages had been released."""
        if releases is None:
            releases = self.releases_before(time)
        column = self._made[:, time] - self._freed[:, releases]
        return dict(zip(self.names, column.tolist()))

    def releases_before(self, time: int) -> int:
        """Return how many storages were released before op number `time`."""
        return int(np.searchsorted(self._release_times, time, side="right"))

    def at_op(self, op: int) -> dict[str, int]:
        """Return the bytes while an op runs."""
        return dict(zip(self.names, self.during[:, op].tolist()))

    def largest(self, first: int, last: int) -> int | None:
        """Return the first op from `first` to before `last` at which most is alive; None if there is none."""
        return first + int(self.totals[first:last].argmax()) if last > first else None


def history_of(
    trace: Trace, kinds: Sequence[str] | None = None, names: tuple[str, ...] = CATEGORIES
) -> MemoryHistory:
    """Add up a trace's allocations and frees; linear in ops and storages.

    With `kinds`, a name for each storage and all names that there are, those are the rows in place of the
    categories; what is a gradient is then of its kind from the beginning.
    """
    row_of = {name: number for number, name in enumerate(names)}
    rows = [row_of[kind] for kind in kinds or [storage.category for storage in trace.storages]]
    ops, occupied = len(trace.ops), trace.memory.occupied
    # What each op makes (in the column after it), what changes before each op without one, and what is freed.
    made, changed, freed = np.zeros((3, len(names), ops + 2), dtype=np.int64)
    last_bytes = list(trace.occupied_bytes)
    for number, storage in enumerate(trace.storages):
        row, size = rows[number], trace.occupied_bytes[number]
        since = min((hold.start for hold in storage.held_by("gradient")), default=storage.start)
        first = row
        if kinds is None and storage.category == "gradient" and since > storage.start:
            first = row_of["temporary"]
            changed[first, since] -= size
            changed[row, since] += size
        # What no op has made was entered before the op at which it begins.
        entered = storage.producer < 0 <= storage.start
        (changed if entered else made)[first, storage.start + (0 if entered else 1)] += size
        for time, resized in storage.resizes:
            changed[row, max(time, 0)] += occupied(resized) - last_bytes[number]
            last_bytes[number] = occupied(resized)
        if storage.end is not None:
            freed[row, storage.end] += last_bytes[number]
    made, changed, freed = (np.cumsum(steps, axis=1) for steps in (made, changed, freed))
    during = made[:, 1 : ops + 1] + changed[:, :ops] - freed[:, :ops]
    order = _releases(trace)
    by_release = np.zeros((len(names), len(order) + 1), dtype=np.int64)
    for place, number in enumerate(order):
        by_release[rows[number], place + 1] = last_bytes[number]
    ends = [trace.storages[number].end or 0 for number in order]
    return MemoryHistory(
        during, made + changed, np.cumsum(by_release, axis=1), np.array(ends, dtype=np.int64), names
    )


def _releases(trace: Trace) -> list[int]:
    """Return the storages that are freed, in order: as recorded, what was not recorded after that.

    A storage that was made smaller before is recorded more than once: the last time it is freed.
    """
    recorded = {number: place for place, number in enumerate(trace.releases)}
    found = [
        (storage.end, recorded.get(number, len(recorded)), number)
        for number, storage in enumerate(trace.storages)
        if storage.end is not None and (number in recorded or storage.bytes or storage.resizes)
    ]
    return [number for _, _, number in sorted(found)]
