"""The allocations and frees of a step, in order: what an allocator is given.

At each time, in this order: what is freed or made smaller before the op runs, what grows, what the op
creates, and the workspace of its kernel, which it frees again. What is freed before what is known from the
recorder (`Trace.releases`); what a plan computes again follows after that, by number. A storage that changes
its size is allocated anew before its old memory is freed, as torch does it.
"""

from __future__ import annotations

from collections import defaultdict

from trainfit.traces.trace import COMPUTE, Event, Op, Trace

_RELEASE, _GROW, _CREATE, _WORKSPACE = range(4)


def events_of(trace: Trace) -> tuple[Event, ...]:
    """Return every allocation and free of the step; those at time -1 were made before it."""
    unseen = len(trace.releases)
    # For each storage the turns of its releases that the recorder saw, the first one last.
    turns: defaultdict[int, list[int]] = defaultdict(list)
    for turn in range(unseen - 1, -1, -1):
        turns[trace.releases[turn]].append(turn)
    found: list[tuple[tuple[int, int, int], Event]] = []
    for number, storage in enumerate(trace.storages):
        last = storage.bytes
        if last:
            first = Event(storage.start, number, last, storage.stream)
            found.append(((storage.start, _CREATE, number), first))
        freed = {} if storage.end is None else {storage.end: 0}
        for time, size in (dict(storage.resizes) | freed).items():
            if not last and not size:
                continue
            key = (time, _GROW, number)
            if size < last:
                key = (time, _RELEASE, turns[number].pop() if turns[number] else unseen + number)
            if time == storage.start and last:
                key = (time, _CREATE, number)  # gone before the op that it was made in
            changes = (change for change in (size, -last) if change)
            found += [(key, Event(time, number, change, storage.stream)) for change in changes]
            last = size
    for number, op in enumerate(trace.ops):
        size = trace.signatures[op.signature].workspace_bytes
        if size:
            key = (number, _WORKSPACE, 0)
            found += [(key, Event(number, -1, change, stream_of(trace, op))) for change in (size, -size)]
    found.sort(key=lambda entry: entry[0])
    return tuple(event for _, event in found)


def stream_of(trace: Trace, op: Op) -> str:
    """Return the stream that an op's kernel asks for memory on; a group is no stream."""
    return COMPUTE if trace.signatures[op.signature].collective is not None else op.queue
