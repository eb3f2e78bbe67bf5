"""A step as slices on tracks: ops on the host and on their queues, phases and modules around them.

Times are whole nanoseconds from the earliest moment that is shown, so that slices which follow each other
never overlap by rounding.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from trainfit.costs.op_times import OpTimes
from trainfit.costs.schedule import Schedule, Seconds, launches
from trainfit.traces.trace import COMPUTE, Trace

HOST = "host"
NESTED = "phases and modules"
_HOST_PROCESS, _DEVICE_PROCESS = 1, 2


@dataclass(frozen=True, slots=True)
class Slice:
    """Something that takes a while, on a track."""

    track: str
    begin: int
    end: int
    name: str
    op: int = -1
    kind: str = "op"


@dataclass(frozen=True)
class Tracks:
    """All ops as slices. On a CPU the host runs them, and there is one track for both."""

    names: tuple[str, ...]
    """Of the tracks, in the order in which they are shown."""
    on_host: bool
    slices: tuple[Slice, ...]
    issue_of: dict[int, Slice]
    """The slice on the host of each op."""
    run_of: dict[int, Slice]
    """The slice on its queue of each op that runs a kernel."""
    begins: tuple[int, ...]
    """When each op begins on its queue."""
    runs_on: dict[str, tuple[int, ...]]
    """The ops with a slice on each queue, in order."""
    queue_of: tuple[str, ...]

    def place(self, track: str) -> tuple[int, int]:
        """Return process and thread of a track."""
        process = _HOST_PROCESS if track == HOST or self.on_host else _DEVICE_PROCESS
        return process, self.names.index(track) + 1

    def last_run(self, op: int) -> Slice | None:
        """Return the op's slice on its queue; of one without a kernel, that of the last before it."""
        runs = self.runs_on.get(self.queue_of[op], ())
        at = bisect_right(runs, op) - 1
        return self.run_of[runs[at]] if at >= 0 else None

    def next_run(self, op: int) -> Slice | None:
        """Return the op's slice on its queue; of one without a kernel, that of the first after it."""
        runs = self.runs_on.get(self.queue_of[op], ())
        at = bisect_left(runs, op)
        return self.run_of[runs[at]] if at < len(runs) else None


def tracks_of(schedule: Schedule, times: OpTimes) -> Tracks:
    """Return the slices of a step."""
    trace, on_host = schedule.trace, schedule.costs.host.runs_kernels
    earliest = min(float(times.host_begin.min(initial=0.0)), 0.0)
    issued = _nanoseconds(times.host_begin, times.host_end, earliest, [HOST] * len(trace.ops))
    issues = {
        number: Slice(HOST, begin, end, trace.op_name(number), number)
        for number, (begin, end) in enumerate(issued)
    }
    if on_host:
        everything = tuple(issues)
        begins = tuple(one.begin for one in issues.values())
        queues = (HOST,) * len(trace.ops)
        return Tracks(
            (HOST, NESTED), True, tuple(issues.values()), issues, issues, begins, {HOST: everything}, queues
        )
    queues = tuple(op.queue for op in trace.ops)
    ran = _nanoseconds(times.begin, times.end, earliest, queues)
    launched = launches(trace, schedule.costs)
    runs = {
        number: Slice(queues[number], begin, end, trace.op_name(number), number)
        for number, (begin, end) in enumerate(ran)
        if launched[number]
    }
    runs_on: defaultdict[str, list[int]] = defaultdict(list)
    for number, one in runs.items():
        runs_on[one.track].append(number)
    others = sorted(set(runs_on) - {COMPUTE}, key=lambda queue: (queue.startswith("group "), queue))
    return Tracks(
        names=(HOST, NESTED, COMPUTE, *others),
        on_host=False,
        slices=(*issues.values(), *runs.values()),
        issue_of=issues,
        run_of=runs,
        begins=tuple(begin for begin, _ in ran),
        runs_on={queue: tuple(numbers) for queue, numbers in runs_on.items()},
        queue_of=queues,
    )


def _nanoseconds(
    begins: Seconds, ends: Seconds, earliest: float, queues: list[str] | tuple[str, ...]
) -> list[tuple[int, int]]:
    """Round times; on each queue, none begins before the one before it ends."""
    found: list[tuple[int, int]] = []
    done: dict[str, int] = {}
    for begin, end, queue in zip(begins.tolist(), ends.tolist(), queues):
        first = max(round((begin - earliest) * 1e9), done.get(queue, 0))
        done[queue] = max(round((end - earliest) * 1e9), first)
        found.append((first, done[queue]))
    return found


def nested_slices(trace: Trace, tracks: Tracks) -> Iterator[Slice]:
    """Yield phases and modules as slices around the ops of the compute queue that are in them.

    A module's slice ends where an op of another module begins; one that is called again has another slice.
    """
    stack: list[tuple[str, str, int]] = []  # name, kind, begin
    queue = HOST if tracks.on_host else COMPUTE
    now = 0
    for number in tracks.runs_on.get(queue, ()):
        one = tracks.run_of[number]
        path = _path(trace, number)
        shared = 0
        while shared < min(len(stack), len(path)) and stack[shared][:2] == path[shared]:
            shared += 1
        while len(stack) > shared:
            name, kind, begin = stack.pop()
            yield Slice(NESTED, begin, now, name, kind=kind)
        stack += [(name, kind, one.begin) for name, kind in path[shared:]]
        now = one.end
    while stack:
        name, kind, begin = stack.pop()
        yield Slice(NESTED, begin, now, name, kind=kind)


def _path(trace: Trace, op: int) -> list[tuple[str, str]]:
    """Return the phase of an op and the modules that it is in, the outermost first."""
    one = trace.ops[op]
    found: list[tuple[str, str]] = []
    module = one.module
    while module >= 0:
        found.append((trace.modules[module].name, "module"))
        module = trace.modules[module].parent
    if one.recompute:
        found.append(("recomputation", "phase"))
    found.append((one.phase, "phase"))
    return found[::-1]
