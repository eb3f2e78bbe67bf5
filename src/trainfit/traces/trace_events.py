"""The allocations and frees of a step, in order: what an allocator is given.

At each time, in this order: what is freed or made smaller before the op runs, what grows, what the op
creates, and the workspace of its kernel, which it frees again. What is freed before what is known from the
recorder (`Trace.releases`); what a plan computes again follows after that, by number. A storage that changes
its size is allocated anew before its old memory is freed, as torch does it.
"""

from __future__ import annotations

from trainfit.traces.trace import Event, Storage, Trace

_RELEASE, _GROW, _CREATE, _WORKSPACE = range(4)


def events_of(trace: Trace) -> tuple[Event, ...]:
    """Return every allocation and free of the step; those at time -1 were made before it."""
    turns = _turns(trace)
    found: list[tuple[tuple[int, int, int], Event]] = []
    for number, storage in enumerate(trace.storages):
        last = storage.bytes
        if last:
            found.append(((storage.start, _CREATE, number), Event(storage.start, number, last)))
        for time, size in _changes(storage).items():
            if not last and not size:
                continue
            shrinks = size < last
            key = (time, _RELEASE, turns(number)) if shrinks else (time, _GROW, number)
            if time == storage.start:
                key = (time, _CREATE, number)  # gone before the op that it was made in
            found += [(key, Event(time, number, change)) for change in (size, -last) if change]
            last = size
    for number, op in enumerate(trace.ops):
        size = trace.signatures[op.signature].workspace_bytes
        if size:
            found += [((number, _WORKSPACE, 0), Event(number, -1, change)) for change in (size, -size)]
    found.sort(key=lambda entry: entry[0])
    return tuple(event for _, event in found)


def _changes(storage: Storage) -> dict[int, int]:
    """Return when a storage changes its size, and to what in the end; it is 0 when the storage is freed."""
    changes = dict(storage.resizes)
    if storage.end is not None:
        changes[storage.end] = 0
    return changes


class _turns:
    """Hands out the turns of the releases: for each storage those that the recorder saw, in order."""

    def __init__(self, trace: Trace) -> None:
        self._seen: dict[int, list[int]] = {}
        for turn in range(len(trace.releases) - 1, -1, -1):
            self._seen.setdefault(trace.releases[turn], []).append(turn)
        self._unseen = len(trace.releases)

    def __call__(self, storage: int) -> int:
        seen = self._seen.get(storage)
        return seen.pop() if seen else self._unseen + storage
