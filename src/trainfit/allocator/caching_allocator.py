"""The allocator with names for what is alive: `CachingAllocator`, its statistics, and what it raises."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, fields

from trainfit.allocator import fast_core
from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.allocator_state import BY_ADDRESS, BY_BLOCK, BY_SEGMENT
from trainfit.allocator.fast_core import AllocatorState, MemoryBlock, StandInDevice
from trainfit.errors import OptionError

MIB = 1 << 20


@dataclass(frozen=True)
class AllocatorStatistics:
    """The allocator's counters and the device's; all bytes but `segments`, `..._blocks`, calls and numbers.

    Peaks count from the beginning or the last reset; `device_used_peak` is never reset. In torch's
    `memory_stats()`, `allocated` is `allocated_bytes.all.current`, `allocated_peak` is `....peak`, and so on.
    """

    allocated: int
    allocated_peak: int
    requested: int
    requested_peak: int
    active: int
    active_peak: int
    reserved: int
    reserved_peak: int
    inactive_split: int
    inactive_split_peak: int
    reserved_small: int
    reserved_small_peak: int
    reserved_large: int
    reserved_large_peak: int
    segments: int
    segments_peak: int
    active_blocks: int
    active_blocks_peak: int
    inactive_split_blocks: int
    inactive_split_blocks_peak: int
    allocations: int
    num_alloc_retries: int
    num_ooms: int
    num_device_alloc: int
    num_device_free: int
    num_sync_all_streams: int
    device_used: int
    device_used_peak: int
    cuda_malloc_calls: int
    cuda_malloc_failures: int
    cuda_free_calls: int
    mem_create_calls: int
    mem_create_failures: int
    mem_releases: int
    address_reservations: int


class OutOfMemory(Exception):
    """A request that the simulated allocator cannot serve; the message is torch's, up to its advice.

    `requested_bytes` was asked for on `stream` under `name`; `statistics` is how things stood then.
    """

    def __init__(
        self, message: str, name: Hashable, requested_bytes: int, stream: int, statistics: AllocatorStatistics
    ) -> None:
        """Keep the figures for programs; the message has them for people."""
        super().__init__(message)
        self.name = name
        self.requested_bytes = requested_bytes
        self.stream = stream
        self.statistics = statistics


class CachingAllocator:
    """torch's CUDA caching allocator on a device of `capacity_bytes`, without a GPU.

    `total_bytes` is what the device says it has, by default the capacity: `fraction` is a share of it, and
    expandable segments reserve address space in proportion to it. With `manual_events`, what `record_stream`
    waits for completes only when `complete_events` is called; otherwise it is complete when it is looked at.
    """

    def __init__(
        self,
        capacity_bytes: int,
        options: AllocatorOptions | None = None,
        total_bytes: int | None = None,
        fraction: float | None = None,
        *,
        manual_events: bool = False,
    ) -> None:
        """Start with nothing reserved; `fraction` replaces that of the options."""
        self.options = options or AllocatorOptions()
        self.state = new_state(capacity_bytes, self.options, total_bytes, fraction)
        self.state.events_are_manual = manual_events
        self._alive: dict[Hashable, MemoryBlock | None] = {}

    def allocate(self, name: Hashable, size: int, stream: int = 0) -> int:
        """Allocate bytes under a name that is not alive, and return their address; 0 for nothing."""
        if name in self._alive:
            raise OptionError(f"{name} is alive already: free it before it is allocated again.")
        if size < 0 or stream < 0:
            raise OptionError(f"{name}: bytes and streams are not negative.")
        if size == 0:
            self._alive[name] = None
            return 0
        block = fast_core.allocate(self.state, size, stream)
        if block is None:
            raise OutOfMemory(out_of_memory_text(self.state, size), name, size, stream, self.statistics())
        self._alive[name] = block
        return block.address

    def free(self, name: Hashable) -> None:
        """Free what was allocated under a name."""
        block = self._of(name)
        del self._alive[name]
        if block is not None:
            fast_core.free(self.state, block)

    def record_stream(self, name: Hashable, stream: int) -> None:
        """Say that another stream uses it: after it is freed, it is not handed out before that is done."""
        block = self._of(name)
        if block is not None:
            fast_core.record_stream(block, stream)

    def complete_events(self) -> None:
        """Let everything that other streams do be done; seen at the next allocation."""
        self.state.completed_stamp = self.state.last_stamp

    def empty_cache(self) -> None:
        """Give back to the device what is free and can be given back, as `torch.cuda.empty_cache()`."""
        fast_core.empty_cache(self.state)

    def reset_peaks(self) -> None:
        """Count peaks from now on, as `torch.cuda.reset_peak_memory_stats()`."""
        self.state.reset_peaks()

    def statistics(self) -> AllocatorStatistics:
        """Return all counters as they are now."""
        return statistics_of(self.state)

    def placements(self) -> dict[Hashable, int]:
        """Return the addresses of all that is alive; 0 for what has no bytes."""
        return {name: block.address if block else 0 for name, block in self._alive.items()}

    def _of(self, name: Hashable) -> MemoryBlock | None:
        if name not in self._alive:
            raise OptionError(f"{name} is not alive.")
        return self._alive[name]


def new_state(
    capacity_bytes: int,
    options: AllocatorOptions,
    total_bytes: int | None = None,
    fraction: float | None = None,
) -> AllocatorState:
    """Return an allocator with nothing reserved, as the options make it."""
    total = capacity_bytes if total_bytes is None else total_bytes
    if capacity_bytes < 0 or total < 0:
        raise OptionError("a device has no negative number of bytes.")
    minor = options.minor_version
    order = BY_ADDRESS if minor < 12 else BY_BLOCK if minor == 12 else BY_SEGMENT
    large_segment = options.large_segment_size_mb * MIB
    state = AllocatorState(StandInDevice(capacity_bytes, total), order, large_segment)
    state.expandable = options.expandable_segments
    if options.max_split_size_mb is not None:
        state.max_split = options.max_split_size_mb * MIB
    rounding = options.max_non_split_rounding_mb
    state.max_rounding = large_segment if rounding is None else rounding * MIB
    state.divisions = list(options.divisions) or None
    share = options.per_process_memory_fraction if fraction is None else fraction
    if not 0 <= share <= 1:
        raise OptionError(f"a memory fraction of {share:g} is not within 0 and 1.")
    if share < 1 or (minor == 9 and fraction is not None):  # 2.9 takes a fraction of 1 for a limit as well
        state.allowed = int(share * total)
        if options.garbage_collection_threshold > 0:
            state.garbage_bytes = int(options.garbage_collection_threshold * state.allowed)
    return state


def statistics_of(state: AllocatorState) -> AllocatorStatistics:
    """Return all counters of an allocator and of its device."""
    device = state.device
    elsewhere = {
        "reserved_small": state.small.reserved,
        "reserved_small_peak": state.small.reserved_peak,
        "reserved_large": state.large.reserved,
        "reserved_large_peak": state.large.reserved_peak,
        "device_used": device.used,
        "device_used_peak": device.used_peak,
        "cuda_malloc_calls": device.malloc_calls,
        "cuda_malloc_failures": device.malloc_failures,
        "cuda_free_calls": device.free_calls,
        "mem_create_calls": device.create_calls,
        "mem_create_failures": device.create_failures,
        "mem_releases": device.releases,
        "address_reservations": device.reservations,
    }
    names = [field.name for field in fields(AllocatorStatistics) if field.name not in elsewhere]
    return AllocatorStatistics(**elsewhere, **{name: getattr(state, name) for name in names})


def out_of_memory_text(state: AllocatorState, size: int) -> str:
    """Return what torch says about a request that it cannot serve, without its advice."""
    device = state.device
    wanted = fast_core.segment_size(state, fast_core.rounded_size(state, size))
    allowed = f"{_size_text(state.allowed)} allowed; " if state.allowed >= 0 else ""
    return (
        f"CUDA out of memory. Tried to allocate {_size_text(wanted)}. GPU 0 has a total capacity of "
        f"{_size_text(device.total)} of which {_size_text(device.capacity - device.used)} is free. {allowed}"
        f"Of the allocated memory {_size_text(state.allocated)} is allocated by PyTorch, and "
        f"{_size_text(state.reserved - state.allocated)} is reserved by PyTorch but unallocated."
    )


def _size_text(size: int) -> str:
    """Write a size as torch does in this message."""
    if size <= 1 << 10:
        return f"{size} bytes"
    for unit, name in ((10, "KiB"), (20, "MiB")):
        if size <= 1 << (unit + 10):
            return f"{size / (1 << unit):.2f} {name}"
    return f"{size / (1 << 30):.2f} GiB"
