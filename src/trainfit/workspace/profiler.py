"""Ground truth on the CPU: every allocation and free that torch's allocator makes, from its profiler."""

from __future__ import annotations

import bisect
import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.autograd.profiler import record_function

Span = tuple[int, int]
"""When something began and ended, in nanoseconds."""


@dataclass(frozen=True)
class Usage:
    """Allocated bytes within a range: when it began, the most, and when it ended."""

    start_bytes: int
    peak_bytes: int
    end_bytes: int
    seconds: float


class AllocationLog:
    """Allocation events of one profiled stretch of code, and named ranges in it."""

    def __init__(self) -> None:
        """Start empty; `profile_allocations` fills the log when its block ends."""
        self._times: list[int] = []
        self._totals: list[int] = []
        self._ranges: dict[str, list[Span]] = {}
        self._operators: list[int] = []
        self._allocations: list[int] = []

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Mark a stretch of code, to ask for its usage later."""
        with record_function(f"trainfit:{name}"):
            yield

    def usage(self, name: str) -> Usage:
        """Return what happened within the range `name`, relative to the start of the profile."""
        start, end = self._ranges[name][-1]
        first = bisect.bisect_left(self._times, start)
        last = bisect.bisect_right(self._times, end)
        before = self._totals[first - 1] if first else 0
        inside = self._totals[first:last]
        return Usage(
            start_bytes=before,
            peak_bytes=max(inside, default=before) if inside else before,
            end_bytes=inside[-1] if inside else before,
            seconds=(end - start) / 1e9,
        )

    def spans(self, name: str) -> list[Span]:
        """Return when the ranges of a name began and ended, in the order in which they began."""
        return sorted(self._ranges.get(name, []))

    def most_bytes(self, spans: list[Span]) -> int:
        """Return the most bytes that were allocated while operators ran within some spans of time.

        What is still there when a span begins and is freed before its first operator does not count.
        """
        most = 0
        for start, end in spans:
            for times, levels_after in ((self._operators, False), (self._allocations, True)):
                for moment in times[bisect.bisect_left(times, start) : bisect.bisect_right(times, end)]:
                    find = bisect.bisect_right if levels_after else bisect.bisect_left
                    place = find(self._times, moment)
                    most = max(most, self._totals[place - 1] if place else 0)
        return most

    def _read(self, result: Any, *, only_own: bool) -> None:
        events: list[tuple[int, int, int]] = []
        pending = list(result.experimental_event_tree())
        while pending:
            event = pending.pop()
            if event.tag == _EventType.Allocation:
                fields = event.extra_fields
                events.append((event.start_time_ns, fields.alloc_size, fields.ptr))
            elif event.name.startswith("trainfit:"):
                span = (event.start_time_ns, event.end_time_ns)
                self._ranges.setdefault(event.name.removeprefix("trainfit:"), []).append(span)
            elif event.tag == _EventType.TorchOp and event.name.removeprefix("aten::") not in _BOOKKEEPING:
                self._operators.append(event.start_time_ns)
            pending.extend(event.children)
        self._operators.sort()
        total = 0
        own: set[int] = set()
        for time, size, address in sorted(events, key=lambda event: event[0]):
            if size > 0:
                own.add(address)
            elif only_own and address not in own:
                continue
            else:
                own.discard(address)
            total += size
            self._times.append(time)
            self._totals.append(total)
            if size > 0:
                self._allocations.append(time)


_BOOKKEEPING = ("detach", "detach_", "alias")
"""Autograd's own, which a trace does not have: pipelines detach outputs when backward is done."""


@contextlib.contextmanager
def profile_allocations(*, only_own: bool = False) -> Iterator[AllocationLog]:
    """Log every allocation of the CPU allocator while the block runs.

    With `only_own`, memory that was there before the block does not count when it is freed inside.
    """
    log = AllocationLog()
    # Not `torch.profiler.profile`: at its end it makes a Python object of every event, which takes longer
    # than the step itself, and only the allocations are wanted.
    activities = {torch.profiler.ProfilerActivity.CPU}
    config = torch._C._profiler.ProfilerConfig(
        torch._C._profiler.ProfilerState.KINETO, False, True, False, False, False,
        torch._C._profiler._ExperimentalConfig(),
    )  # fmt: skip
    torch._C._autograd._prepare_profiler(config, activities)
    torch._C._autograd._enable_profiler(config, activities)
    try:
        yield log
    finally:
        result = torch._C._autograd._disable_profiler()
    log._read(result, only_own=only_own)


@contextlib.contextmanager
def no_cycle_collection() -> Iterator[None]:
    """Keep the collector of reference cycles out: when it runs is chance, and it frees tensors.

    Who calls `gc.collect` inside gets it quickly: only what was made inside is looked at.
    """
    enabled = gc.isenabled()
    gc.disable()
    # What somebody else has frozen must stay so, and there is only one ice box.
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if enabled:
            gc.enable()
