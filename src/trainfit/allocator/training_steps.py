"""What a caching allocator is asked for in training: before the first step, in it, and in later ones.

A trace is of a steady step. The first one is different: optimizer state is made in its optimizer phase, and
the workspaces of libraries at the first product, between memory that the step frees again. That decides how
memory is cut up for all later steps. What a step leaves behind for the next one to free (gradients that are
dropped when the next step begins) does not exist yet either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from trainfit.devices.library_handles import LibraryWorkspace
from trainfit.traces.trace import COMPUTE, Event, Interval, Storage, Trace
from trainfit.traces.trace_events import events_of

Request = tuple[int, int]
"""The number of a block and its bytes if it is allocated; 0 bytes if it is freed."""


class TrainingSteps:
    """The requests of one step after the other. Blocks have the same number for as long as they live."""

    def __init__(self, trace: Trace, kept: Sequence[LibraryWorkspace] = ()) -> None:
        """Take a steady step, and what libraries keep besides."""
        self._leaves_behind = _left_for_the_next_step(trace)
        first = _first_step(trace, set(self._leaves_behind.values()))
        blocks = tuple(_library_block(block.bytes, block.first_op) for block in kept)
        self._first = events_of(replace(first, storages=first.storages + blocks))
        self._later = [event for event in events_of(trace) if event.time >= 0]
        self._ends = [
            number
            for number, storage in enumerate(trace.storages)
            if not storage.persistent and storage.end is None and number not in self._leaves_behind
        ]
        """What outlives a step without being there in the next: what the step returns."""
        self._numbers: defaultdict[int, list[int]] = defaultdict(list)
        numbered = stream_numbers(trace)
        self._number_of = numbered
        self._also_used_on = {
            number: tuple(numbered[name] for name in storage.also_used_on)
            for number, storage in enumerate(trace.storages)
            if storage.also_used_on
        }
        self.streams: list[int] = []
        """The stream of each block, by its number; 0 is the compute queue."""
        self.also_used_on: dict[int, tuple[int, ...]] = {}
        """The streams that use a block beside its own, as `record_stream` says."""
        self._ops = len(trace.ops)
        self.origins: list[tuple[int, int]] = []
        """For each of the last requests: the op that it is of, and the storage; those after the trace's own
        are blocks of libraries, and -1 is a kernel's workspace."""

    def before(self) -> list[Request]:
        """Return what is allocated before the first step: parameters, buffers, inputs."""
        return self._requests([event for event in self._first if event.time < 0])

    def first(self) -> list[Request]:
        """Return the requests of the first step."""
        return self._step([event for event in self._first if event.time >= 0])

    def next(self) -> list[Request]:
        """Return the requests of one more step."""
        return self._step(self._later)

    def _step(self, events: Sequence[Event]) -> list[Request]:
        requests = self._requests(events)
        for storage in self._ends:
            gone = [(number, 0) for number in self._numbers.pop(storage, [])]
            requests += gone
            self.origins += [(self._ops, storage)] * len(gone)
        for made, freed_later in self._leaves_behind.items():
            self._numbers[freed_later] = self._numbers.pop(made, [])
        return requests

    def _requests(self, events: Sequence[Event]) -> list[Request]:
        found: list[Request] = []
        numbers = self._numbers
        self.origins = []
        for event in events:
            if event.bytes > 0:
                block = len(self.streams)
                self.streams.append(self._number_of[event.stream])
                if event.storage in self._also_used_on:
                    self.also_used_on[block] = self._also_used_on[event.storage]
                numbers[event.storage].append(block)
                found.append((block, event.bytes))
                self.origins.append((event.time, event.storage))
            elif numbers[event.storage]:
                # A storage that is resized has its new block already; the old one is freed.
                found.append((numbers[event.storage].pop(0), 0))
                self.origins.append((event.time, event.storage))
        return found


def stream_numbers(trace: Trace) -> dict[str, int]:
    """Number the streams that memory is allocated on, and those that use it: 0 is the compute queue."""
    names = {name for storage in trace.storages for name in (storage.stream, *storage.also_used_on)}
    names |= {op.queue for op in trace.ops}
    return {name: number for number, name in enumerate((COMPUTE, *sorted(names - {COMPUTE})))}


def _left_for_the_next_step(trace: Trace) -> dict[int, int]:
    """Pair what a step leaves with what, of the same size and stream, a step finds and frees."""
    freed: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
    for number, storage in reversed(list(enumerate(trace.storages))):
        if storage.persistent and storage.end is not None and storage.bytes:
            freed[storage.bytes, storage.stream].append(number)
    return {
        number: freed[_last_bytes(storage), storage.stream].pop()
        for number, storage in enumerate(trace.storages)
        if not storage.persistent and storage.end is None and freed[_last_bytes(storage), storage.stream]
    }


def _last_bytes(storage: Storage) -> int:
    return storage.resizes[-1][1] if storage.resizes else storage.bytes


def _first_step(trace: Trace, not_yet: set[int]) -> Trace:
    storages = [
        replace(storage, bytes=0, resizes=())
        if number in not_yet
        else replace(storage, start=storage.born)
        if storage.born >= 0
        else storage
        for number, storage in enumerate(trace.storages)
    ]
    return replace(trace, storages=tuple(storages), observed_peak_bytes=None)


def _library_block(size: int, first_op: int) -> Storage:
    return Storage(size, "temporary", -1, first_op, None, (Interval("program", first_op, None),))
