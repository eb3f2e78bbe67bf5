"""What runs when: one lane per queue, from the simulated queues of a schedule."""

from __future__ import annotations

from typing import Any

import numpy as np

from trainfit.costs.op_times import op_times
from trainfit.costs.schedule import Schedule
from trainfit.traces.trace import COMPUTE
from trainfit.webpage.memory_columns import NANO
from trainfit.webpage.page_parts import gaps

HOST = "host"


def lanes(schedule: Schedule) -> list[dict[str, Any]]:
    """Return the lanes of a step: compute first, then communication and other streams, then the host.

    Times are nanoseconds since the step began; views and the like, which run nothing, are left out.
    """
    times, ops = op_times(schedule), schedule.trace.ops
    busy = schedule.device_seconds > 0
    if schedule.costs.host.runs_kernels:
        whole = np.ones(len(ops), dtype=np.bool_)
        return [_lane("processor", whole, times.begin, times.end)]
    queues = dict.fromkeys(op.queue for op in ops)
    exchanges = {op.queue for op in ops if schedule.trace.signatures[op.signature].collective is not None}
    found = []
    for queue in sorted(queues, key=lambda name: (name != COMPUTE, name not in exchanges)):
        members = np.fromiter((op.queue == queue for op in ops), dtype=np.bool_, count=len(ops)) & busy
        if members.any():
            found.append(_lane(_label(queue, queue in exchanges), members, times.begin, times.end))
    issued = np.ones(len(ops), dtype=np.bool_)
    return [*found, _lane(HOST, issued, times.host_begin, times.host_end)]


def _label(queue: str, exchanges: bool) -> str:
    """Name a lane as people do: what it is for, then which one."""
    if queue == COMPUTE:
        return queue
    return f"communication, {queue}" if exchanges else f"stream {queue.removeprefix('stream ')}"


def _lane(label: str, members: Any, start: Any, end: Any) -> dict[str, Any]:
    numbers = np.flatnonzero(members)
    begins = np.round(start[members] * NANO).astype(np.int64)
    lasts = np.round(end[members] * NANO).astype(np.int64)
    return {
        "label": label,
        "ops": gaps(numbers.tolist()),
        "starts": gaps(begins.tolist()),
        "durations": (lasts - begins).tolist(),
    }
