"""Memory that is free for the program, and not yet for the allocator, because another queue is behind.

What `record_stream` names is given back when the queue that it names has done what it was given until the
tensor died. torch's allocator asks whenever something is allocated, in the order in which the host issues
ops: so the memory can be used again from the first op on that is issued after that. How far the host is ahead
of its queues decides about how long that is.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

import numpy as np

from trainfit.costs.op_times import op_times
from trainfit.costs.schedule import Schedule
from trainfit.traces.trace import Interval, Storage, Trace


def with_late_frees(times: Schedule) -> Trace:
    """Return the trace in which such storages live until their memory can be used again.

    For the allocator only: the program itself counts them as freed, as torch does in `memory_allocated`.
    """
    trace = times.trace
    recorded = [n for n, one in enumerate(trace.storages) if one.also_used_on and one.end is not None]
    if times.costs.host.runs_kernels or not recorded:
        return trace
    placed = op_times(times)
    issued = np.maximum.accumulate(placed.host_end)
    queues: dict[str, list[int]] = {}
    for number, op in enumerate(trace.ops):
        queues.setdefault(op.queue, []).append(number)
    storages = list(trace.storages)
    for number in recorded:
        storage = storages[number]
        assert storage.end is not None
        done = max(_done(queues.get(queue, []), storage.end, placed.end) for queue in storage.also_used_on)
        later = int(np.searchsorted(issued, done, side="left"))
        storages[number] = _until(storage, min(max(storage.end, later), len(trace.ops)))
    return replace(trace, storages=tuple(storages))


def _done(ops: list[int], end: int, ends: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Return when a queue is done with what it was given before an op."""
    before = bisect_left(ops, end)
    return float(ends[ops[before - 1]]) if before else 0.0


def _until(storage: Storage, end: int) -> Storage:
    if end == storage.end:
        return storage
    last = Interval("program", storage.end or 0, end)
    return replace(storage, end=end, holders=(*storage.holders, last))
