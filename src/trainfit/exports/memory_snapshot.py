"""`--snapshot`: the memory of a step as `torch.cuda.memory._snapshot()` has it, for PyTorch's memory_viz.

The history begins with the memory as a steady step finds it: its segments, and an allocation for everything
that is there. Then comes the step. `segments` is how things are when it ends. A mark, the action `snapshot`,
is where the peak of the step is first reached. Sizes of allocations are those asked for, as torch's are.

The file is a pickle of dictionaries, lists, texts and numbers only, in protocol 4, which the viewer reads.
trainfit writes such files and never reads any.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainfit.allocator.allocator_options import INTERVALS, AllocatorOptions
from trainfit.allocator.placed_blocks import PlacedBlock, PlacedRequest, PlacedSegment, PlacedStep
from trainfit.allocator.placed_step import placed_step
from trainfit.basics.sealed_files import write_whole
from trainfit.exports.op_frames import OpFrames, frame
from trainfit.exports.shown_step import ShownStep, shown_step
from trainfit.traces.trace import PHASES

_PROTOCOL = 4
"""The newest that the viewer reads."""
_POOL = (0, 0)
_MIB = 1 << 20

Entry = dict[str, Any]


def write_snapshot(result: object, path: str | Path) -> None:
    """Write the memory of an estimate or a plan as a snapshot that memory_viz reads."""
    data = pickle.dumps(memory_snapshot(shown_step(result)), protocol=_PROTOCOL)
    write_whole(Path(path), data)


def memory_snapshot(step: ShownStep) -> dict[str, Any]:
    """Return the snapshot: plain data."""
    placed = placed_step(step.memory)
    names = tuple(one.name for one in step.memory.libraries) if placed.is_cached else ()
    frames = OpFrames(step.timeline.trace, names)
    history = _History(step, placed, frames)
    return {
        "segments": [_segment(segment, frames) for segment in placed.after],
        "device_traces": [list(history.entries())],
        "allocator_settings": _settings(step.memory.options if placed.is_cached else None),
        "external_annotations": list(history.phases()),
    }


class _History:
    """The entries of one device: what is there, then the step."""

    def __init__(self, step: ShownStep, placed: PlacedStep, frames: OpFrames) -> None:
        self._step, self._placed, self._frames = step, placed, frames
        self._times = _microseconds(step)

    def entries(self) -> Iterator[Entry]:
        placed = self._placed
        yield from self._moved((), placed.before, -1)
        for segment in placed.before:
            for block in segment.blocks:
                if block.storage is not None:
                    there = PlacedRequest(-1, block.storage, block.address, block.requested, segment.stream)
                    yield self._allocation(there)
        segments, marked = placed.before, False
        peak_op = self._step.timeline.peak_op
        for number, request in enumerate(placed.requests):
            if not marked and (
                request.op > peak_op or (request.op == peak_op and self._frees_workspace(request))
            ):
                marked = True
                yield self._mark(peak_op)
            if number in placed.grown:
                yield from self._moved(segments, placed.grown[number], request.op)
                segments = placed.grown[number]
            if request.bytes > 0:
                yield self._allocation(request)
            else:
                yield from self._release(request)
        if not marked:
            yield self._mark(peak_op)

    def phases(self) -> Iterator[Entry]:
        """Yield when each phase begins and ends."""
        ops = self._step.timeline.trace.ops
        for phase in PHASES:
            inside = [number for number, op in enumerate(ops) if op.phase == phase]
            if inside:
                for stage, op in (("START", inside[0]), ("END", inside[-1] + 1)):
                    yield {"stage": stage, "name": phase, "device": 0, "time_us": self._time(op)}

    def _frees_workspace(self, request: PlacedRequest) -> bool:
        """While an op runs, its results and its kernel's workspace are there: the peak is before this."""
        return request.storage == -1 and request.bytes < 0

    def _allocation(self, request: PlacedRequest) -> Entry:
        stack = self._frames.of_storage(request.storage, request.op)
        entry = self._entry("alloc", request.op, request.address, request.bytes, stack, request.stream)
        return {**entry, "category": self._frames.category(request.storage)}

    def _release(self, request: PlacedRequest) -> Iterator[Entry]:
        stack = self._frames.of_op(request.op)
        for action in ("free_requested", "free_completed"):
            yield self._entry(action, request.op, request.address, -request.bytes, stack, request.stream)

    def _moved(
        self, before: Sequence[PlacedSegment], after: Sequence[PlacedSegment], op: int
    ) -> Iterator[Entry]:
        """Yield what the allocator takes of the device, and what it gives back."""
        old, new = _memory_of(before), _memory_of(after)
        stack = self._frames.of_op(op)
        for (address, size), grows in old.items():
            if (address, size) not in new and not grows:
                yield self._entry("segment_free", op, address, size, stack)
        for (address, size), grows in new.items():
            if grows:
                # The part of it that was not there before: these are only ever mapped at their ends.
                start = max(
                    (a + s for (a, s), g in old.items() if g and a <= address < a + s), default=address
                )
                if start < address + size:
                    yield self._entry("segment_map", op, start, address + size - start, stack)
            elif (address, size) not in old:
                yield self._entry("segment_alloc", op, address, size, stack)

    def _mark(self, peak_op: int) -> Entry:
        timeline = self._step.timeline
        stack = [frame("trainfit", max(peak_op, 0), "the peak of the step"), *self._frames.of_op(peak_op)]
        # A viewer that colours by category needs one that is `unknown`.
        entry = self._entry("snapshot", peak_op, 0, timeline.peak_bytes, stack)
        return {**entry, "category": "unknown"}

    def _entry(
        self, action: str, op: int, address: int, size: int, stack: list[dict[str, Any]], stream: int = 0
    ) -> Entry:
        return {
            "action": action,
            "addr": address,
            "size": size,
            "stream": stream,
            "time_us": self._time(op),
            "pool_id": _POOL,
            "frames": stack,
        }

    def _time(self, op: int) -> int:
        return 0 if op < 0 else self._times[op]


def _microseconds(step: ShownStep) -> list[int]:
    """Return when each op begins, and the end of the step; without costs the number of an op is its time.

    Memory is asked for in the order of ops: where queues overlap, no op is before the one before it.
    """
    times = step.op_times
    if times is None:
        return list(range(len(step.timeline.trace.ops) + 1))
    found, now = [], 0.0
    for seconds in (*times.begin.tolist(), float(times.end.max(initial=0.0))):
        now = max(now, seconds)
        found.append(round(now * 1e6))
    return found


def _memory_of(segments: Sequence[PlacedSegment]) -> dict[tuple[int, int], bool]:
    """Return places of segments, and whether they can grow."""
    return {segment.place: segment.expandable for segment in segments}


def _segment(segment: PlacedSegment, frames: OpFrames) -> Entry:
    used = [block for block in segment.blocks if block.storage is not None]
    allocated = sum(block.size for block in used)
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(block.requested for block in used),
        "stream": segment.stream,
        "segment_type": "small" if segment.small else "large",
        "segment_pool_id": _POOL,
        "is_expandable": segment.expandable,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested,
                "state": _state(block),
                "frames": [] if block.storage is None else frames.of_storage(block.storage, -1),
            }
            for block in segment.blocks
        ],
    }


def _state(block: PlacedBlock) -> str:
    if block.storage is not None:
        return "active_allocated"
    return "active_pending_free" if block.waits else "inactive"


def _settings(options: AllocatorOptions | None) -> dict[str, Any]:
    """Return the allocator's settings under the names that torch's snapshots have."""
    if options is None:
        return {}
    split = options.max_split_size_mb
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1 if split is None else split * _MIB,
        "garbage_collection_threshold": options.garbage_collection_threshold,
        "expandable_segments": options.expandable_segments,
        "roundup_power2_divisions": {
            str(1 << at): divisions for at, divisions in enumerate(options.divisions or [0] * INTERVALS)
        },
    }
