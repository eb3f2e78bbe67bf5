"""`--perfetto`: a step in time, as a trace that ui.perfetto.dev and chrome://tracing open.

The format is Chrome's Trace Event Format. There is a process for the host and one for the device, with a
track for each queue: `compute`, other streams (copies), communication groups; and one on which phases and
modules enclose each other. Ops are slices. Arrows lead from where an op is issued to where it runs, and from
an op to those of other queues that wait for it. Counters are bytes in use, by category and in total.

Times are microseconds with three decimals. Memory is counted in the order of ops: where queues overlap, a
counter changes no earlier than the ones before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainfit import __version__
from trainfit.basics.sealed_files import write_whole
from trainfit.basics.units import format_bytes
from trainfit.costs.schedule import Schedule, launches
from trainfit.errors import OptionError
from trainfit.exports.queue_slices import HOST, NESTED, Slice, Tracks, nested_slices, tracks_of
from trainfit.exports.shown_step import ShownStep, shown_step
from trainfit.traces.settings import describe
from trainfit.traces.trace import Trace

NO_SPEED = (
    "--perfetto shows a step in time, and nothing is known about the device's speed: take a device whose "
    "file has FLOP/s and bytes/s, or --costs measured."
)
Event = dict[str, Any]


def write_perfetto(result: object, path: str | Path) -> None:
    """Write an estimate or a plan as a trace for Perfetto."""
    text = json.dumps(perfetto_trace(shown_step(result)), allow_nan=False, separators=(",", ":"))
    write_whole(Path(path), text.encode())


def perfetto_trace(step: ShownStep) -> dict[str, Any]:
    """Return the trace: plain data."""
    if step.times is None or step.op_times is None:
        raise OptionError(NO_SPEED)
    drawing = _Drawing(step, step.times, tracks_of(step.times, step.op_times))
    trace = step.timeline.trace
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "made by": f"trainfit {__version__} (predicted)",
            "target": trace.target,
            "step": describe(trace.settings),
            "device": step.memory.device.name,
            "torch": trace.torch,
            "step_seconds": step.times.step_seconds,
            "peak_bytes": step.timeline.peak_bytes,
        },
        "traceEvents": list(drawing.events()),
    }


class _Drawing:
    """The events of one step."""

    def __init__(self, step: ShownStep, times: Schedule, tracks: Tracks) -> None:
        self._step, self._times, self._tracks = step, times, tracks
        self._trace: Trace = times.trace

    def events(self) -> Iterator[Event]:
        yield from self._names()
        for one in nested_slices(self._trace, self._tracks):
            yield {**self._slice(one), "cat": "module", "args": {"kind": one.kind}}
        for one in self._tracks.slices:
            args = (
                {"op": one.op} if one.track == HOST and not self._tracks.on_host else self._arguments(one.op)
            )
            yield {**self._slice(one), "cat": self._trace.ops[one.op].phase, "args": args}
        yield from self._arrows()
        yield from self._memory()

    def _names(self) -> Iterator[Event]:
        """Name the tracks, in the order in which they are shown."""
        device = self._step.memory.device.name
        processes = {self._tracks.place(HOST)[0]: "host"}
        if not self._tracks.on_host:
            processes[self._tracks.place(NESTED)[0]] = device
        for at, (pid, name) in enumerate(processes.items()):
            yield _metadata("process_name", pid, 0, name=name)
            yield _metadata("process_sort_index", pid, 0, sort_index=at)
        for at, track in enumerate(self._tracks.names):
            pid, tid = self._tracks.place(track)
            yield _metadata("thread_name", pid, tid, name=self._track_name(track))
            yield _metadata("thread_sort_index", pid, tid, sort_index=at)

    def _track_name(self, track: str) -> str:
        if track == HOST:
            return "runs the ops" if self._tracks.on_host else "issues the ops"
        return f"communication, {track}" if track.startswith("group ") else track

    def _slice(self, one: Slice) -> Event:
        pid, tid = self._tracks.place(one.track)
        duration = (one.end - one.begin) / 1000
        return {"name": one.name, "ph": "X", "ts": one.begin / 1000, "dur": duration, "pid": pid, "tid": tid}

    def _arguments(self, op: int) -> Event:
        trace, one = self._trace, self._trace.ops[op]
        signature, cost = trace.signatures[one.signature], self._times.costs.costs[one.signature]
        found = {
            "op": op,
            "module": trace.module_name(one.module),
            "phase": "recomputation" if one.recompute else one.phase,
            "flops": signature.flops,
            "bytes moved": signature.moved_bytes,
            "bytes made": sum(trace.occupied_bytes[number] for number in one.creates),
            "workspace bytes": trace.workspace_bytes[one.signature],
            "bytes in use": int(self._step.timeline.used_bytes[op]),
            "price": cost.source,
            "limited by": cost.bound,
        }
        if signature.collective is not None:
            exchanged = signature.collective
            found |= {"collective": exchanged.kind, "ranks": exchanged.group_size, "bytes": exchanged.bytes}
        return found

    def _arrows(self) -> Iterator[Event]:
        """Yield two ends for each arrow: from within the slice that is waited for to the begin of another."""
        for number, (before, after, why) in enumerate(self._waits(), 1):
            middle = (before.begin + before.end) // 2
            start: Event = {"ph": "s", "ts": middle / 1000}
            # Rounding may let the second begin before that.
            end: Event = {"ph": "f", "bp": "e", "ts": max(after.begin, middle) / 1000}
            for one, at in ((before, start), (after, end)):
                pid, tid = self._tracks.place(one.track)
                yield {"name": why, "cat": why, "id": number, "pid": pid, "tid": tid, **at}

    def _waits(self) -> Iterator[tuple[Slice, Slice, str]]:
        tracks = self._tracks
        if tracks.on_host:
            return
        launched = launches(self._trace, self._times.costs)
        for number, op in enumerate(self._trace.ops):
            runs = tracks.run_of.get(number)
            if runs is not None and launched[number]:
                yield tracks.issue_of[number], runs, "launch"
            for other in op.waits_for:
                before, after = tracks.last_run(other), tracks.next_run(number)
                if before is not None and after is not None:
                    yield before, after, "wait"
            if op.host_waits and number + 1 < len(self._trace.ops):
                before = tracks.last_run(number)
                if before is not None:
                    yield before, tracks.issue_of[number + 1], "the host waits"

    def _memory(self) -> Iterator[Event]:
        """Yield bytes in use where they change, and a mark at the peak."""
        timeline, pid = self._step.timeline, self._tracks.place(NESTED)[0]
        last: dict[str, int] = {}
        for op, begin in enumerate(self._counted_at()):
            now = timeline.categories_at(op)
            if now != last:
                last = now
                at = {"ph": "C", "ts": begin / 1000, "pid": pid, "tid": 0}
                yield {"name": "memory by category", **at, "args": now}
                yield {"name": "memory", **at, "args": {"bytes": sum(now.values())}}
            if op == timeline.peak_op:
                where = {"op": op, "operator": self._trace.op_name(op)}
                where["module"] = self._trace.module_name(self._trace.ops[op].module)
                mark = {"ph": "i", "s": "g", "ts": begin / 1000, "pid": pid, "tid": 0, "cat": "memory"}
                name = f"peak: {format_bytes(timeline.peak_bytes)}"
                yield {"name": name, **mark, "args": {**where, "bytes": timeline.peak_bytes, **now}}

    def _counted_at(self) -> Sequence[int]:
        """Return when each op's memory is in use, in nanoseconds: in the order of ops."""
        found, now = [], 0
        for begin in self._tracks.begins:
            now = max(now, begin)
            found.append(now)
        return found


def _metadata(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}
