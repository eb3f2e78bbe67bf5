"""When each op is issued and when it runs, in seconds from the step's begin: what a timeline is drawn of.

The queues' times are those of the steady step that `schedule.py` simulates. How far the host is ahead of
them, that says nothing about: it is drawn as if it began with the step too, and earlier only with what has to
be issued by then. So nothing runs before it is issued, and nothing later than it would.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainfit.costs.schedule import Schedule, Seconds, launches, queue_ends


@dataclass(frozen=True)
class OpTimes:
    """Begin and end of every op, on the host and on its queue. On a CPU both are the same."""

    host_begin: Seconds
    host_end: Seconds
    begin: Seconds
    end: Seconds


def op_times(times: Schedule) -> OpTimes:
    """Lay a step out in time; linear in ops."""
    host, device = times.host_seconds, times.device_seconds
    if times.costs.host.runs_kernels:
        end = np.cumsum(host + device)
        begin = end - device - host
        return OpTimes(begin, end, begin, end)
    end = queue_ends(times)
    begin = end - device
    issued = np.minimum(_from_the_begin(times, end), _just_in_time(times, begin))
    return OpTimes(issued - host, issued, begin, end)


def _from_the_begin(times: Schedule, ends: Seconds) -> Seconds:
    """Return when each op is issued if the host begins with the step, and waits where it must."""
    now, found = 0.0, np.zeros(len(ends))
    waits = [op.host_waits for op in times.trace.ops]
    for number, (seconds, end) in enumerate(zip(times.host_seconds.tolist(), ends.tolist())):
        now += seconds
        found[number] = now
        if waits[number]:
            now = max(now, end)
    return found


def _just_in_time(times: Schedule, begins: Seconds) -> Seconds:
    """Return the latest time at which each op can be issued, so that none of them runs later."""
    launched = launches(times.trace, times.costs)
    latest = np.where(launched, begins - times.costs.host.launch, np.inf)
    found, following = np.zeros(len(begins)), np.inf
    for number in range(len(begins) - 1, -1, -1):
        following = min(following, latest[number])
        found[number] = following
        following -= times.host_seconds[number]
    return found
