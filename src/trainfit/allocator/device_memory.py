"""What a step takes of a device's memory: allocated, reserved, and the least with which it runs.

On a GPU torch's caching allocator hands memory out: `TrainingSteps` says what it is asked for from before the
first step on, and the simulation what it reserves for that. On a CPU a step takes what it asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.caching_allocator import OutOfMemory
from trainfit.allocator.capacity_search import smallest_capacity
from trainfit.allocator.event_sequence import AllocationSequence
from trainfit.allocator.named_options import DEFAULT_OPTIONS
from trainfit.allocator.sequence_replay import AllocatorReplay, replay
from trainfit.allocator.step_columns import StepColumns, columns_of
from trainfit.allocator.training_steps import TrainingSteps
from trainfit.devices.device_table import Device
from trainfit.devices.library_handles import LibraryWorkspace, library_workspaces
from trainfit.traces.simulate import Timeline

_STEPS = (4, 8, 16)
"""How many steps are replayed: the least of these in whose last one nothing changes. Mostly the second
leaves memory as the later ones find it."""

_LARGEST_BYTES = 8 << 40
"""Peaks above 8 TiB are on no GPU, and not replayed: the step needs at least its peak."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device, predicted. On a CPU all of them are the peak."""

    allocated_peak_bytes: int
    """What `torch.cuda.max_memory_allocated` says: storages, workspaces of kernels and of libraries."""
    reserved_peak_bytes: int
    """What `torch.cuda.max_memory_reserved` says, where there is memory enough."""
    smallest_memory_bytes: int
    """The least memory for the allocator with which the step runs."""
    libraries: tuple[LibraryWorkspace, ...] = ()
    """What cuBLAS and its like keep; it is in all of the figures."""
    grows_for_steps: int | None = None
    """After how many steps the allocator still reserved more than before; None if it does not any more."""


@dataclass(frozen=True)
class StepMemory:
    """A step on a device, replayed as often as somebody asks; each answer is worked out once."""

    timeline: Timeline
    device: Device
    options: AllocatorOptions | None = DEFAULT_OPTIONS
    """None: memory is taken as it is asked for, and never cut up."""

    @property
    def figures(self) -> DeviceMemory:
        """All figures."""
        if not self.is_simulated:
            peak = self.timeline.peak_bytes
            return DeviceMemory(peak, peak, peak)
        return DeviceMemory(
            self._unlimited.allocated_peak_bytes,
            self._unlimited.reserved_peak_bytes,
            self.smallest_bytes,
            self.libraries,
            None if _is_steady(self._unlimited) else _STEPS[-1],
        )

    def with_expandable_segments(self) -> StepMemory | None:
        """Return the same with expandable segments; None if it has them, or has no such allocator."""
        if not self.is_simulated or self.options is None or self.options.expandable_segments:
            return None
        return replace(self, options=replace(self.options, expandable_segments=True))

    @cached_property
    def smallest_bytes(self) -> int:
        """The least memory with which the step runs."""
        if not self.is_simulated:
            return self.timeline.peak_bytes
        return least_capacity(self.sequence, self.options, self.device)

    def runs_within(self, capacity_bytes: int) -> bool:
        """Whether the step runs with so much memory for the allocator."""
        if capacity_bytes < self.timeline.peak_bytes:
            return False
        if not self.is_simulated:
            return True
        if "smallest_bytes" in vars(self):
            return self.smallest_bytes <= capacity_bytes
        if self._unlimited.reserved_peak_bytes <= capacity_bytes:
            return True
        return not self._replayed(capacity_bytes).out_of_memory

    @property
    def sequence(self) -> AllocationSequence:
        """What the allocator is asked for: everything before the first step, and steps until it is steady."""
        return self._replayed_until_steady[0]

    @property
    def steps(self) -> int:
        """How many steps are replayed until memory is steady."""
        return len(self._unlimited.moments) - 1

    @property
    def _unlimited(self) -> AllocatorReplay:
        return self._replayed_until_steady[1]

    @cached_property
    def _replayed_until_steady(self) -> tuple[AllocationSequence, AllocatorReplay]:
        for steps in _STEPS:
            sequence = self._sequence_of(steps)
            replayed = replay(sequence, self.options)
            if _is_steady(replayed):
                break
        return sequence, replayed

    def _sequence_of(self, steps: int) -> AllocationSequence:
        """Return what is asked for before the first step and in so many, with a mark after each."""
        if self._columns is not None:
            return self._columns.sequence(steps)
        training = TrainingSteps(self.timeline.trace, self.libraries)
        found = AllocationSequence()
        for requests in (training.before(), training.first(), *(training.next() for _ in range(1, steps))):
            for number, size in requests:
                if size:
                    found.allocate(number, size, training.streams[number])
                    continue
                for stream in training.also_used_on.get(number, ()):
                    found.record_stream(number, stream)
                found.free(number)
            found.mark()
        return found

    @cached_property
    def _columns(self) -> StepColumns | None:
        return columns_of(self.timeline.trace, self.libraries)

    @property
    def is_simulated(self) -> bool:
        """Whether an allocator is replayed; otherwise the step takes what it asks for."""
        on_gpu = self.timeline.trace.device == "cuda" and self.options is not None
        return on_gpu and self.timeline.peak_bytes <= _LARGEST_BYTES

    @cached_property
    def libraries(self) -> tuple[LibraryWorkspace, ...]:
        """What cuBLAS and its like keep."""
        return library_workspaces(self.timeline.trace, self.device)

    def _replayed(self, capacity_bytes: int) -> AllocatorReplay:
        total = max(self.device.memory_bytes, capacity_bytes)
        return replay(self.sequence, self.options, capacity_bytes, total_bytes=total)


def least_capacity(sequence: AllocationSequence, options: AllocatorOptions | None, device: Device) -> int:
    """Return the least memory for the allocator with which a sequence runs on a device."""
    try:
        return smallest_capacity(sequence, options, total_bytes=device.memory_bytes)
    except OutOfMemory:
        # Expandable segments reserve addresses for little more than the device has: ask a larger one.
        enough = 2 * replay(sequence, options).reserved_peak_bytes
        return smallest_capacity(sequence, options, total_bytes=enough)


def _is_steady(replayed: AllocatorReplay) -> bool:
    """Whether the last step left the device's memory as it found it."""
    before, after = (moment.statistics for moment in replayed.moments[-2:])
    return (before.reserved, before.reserved_peak) == (after.reserved, after.reserved_peak)
