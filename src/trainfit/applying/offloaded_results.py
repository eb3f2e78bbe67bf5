"""Results of a region in the host's memory, from its forward to its backward.

On a GPU copies run on streams of their own, from and to pinned memory: a result's device memory is handed
back when the call beside which it is copied ends, and taken again when that call's backward begins. On a CPU
the host's memory is memory that torch does not own (`changes/host_memory.py`); a result is copied when its
region ends.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainfit.changes.host_memory import host_like
from trainfit.plans.plan import NamedCall


@dataclass(eq=False)
class _Buffer:
    """Memory of the host, and the last copy that reads or writes it."""

    bytes: torch.Tensor
    last: Any = None
    """An event of a GPU's stream; None if the last copy is done."""


def has_streams(device: torch.device) -> bool:
    """Whether copies run beside what a device computes."""
    return device.type != "cpu"


class HostMemory:
    """The host's memory that the regions of one model use: what is free is used again for the same size."""

    def __init__(self) -> None:
        """Begin without memory: it is taken when it is needed first."""
        self._lock = threading.Lock()
        self._free: defaultdict[tuple[int, bool], list[_Buffer]] = defaultdict(list)
        self._streams: dict[tuple[torch.device, str], Any] = {}
        self._beside: defaultdict[NamedCall, list[HostCopy]] = defaultdict(list)

    def take(self, source: torch.Tensor) -> _Buffer:
        """Return memory for these bytes."""
        with self._lock:
            free = self._free[source.numel(), source.is_cuda]
            if free:
                return free.pop()
        return _Buffer(host_like(source))

    def give_back(self, buffer: _Buffer) -> None:
        """Let memory be used again."""
        with self._lock:
            self._free[buffer.bytes.numel(), buffer.bytes.is_pinned()].append(buffer)

    def stream(self, device: torch.device, direction: str) -> Any:
        """Return the stream of copies in one direction."""
        with self._lock:
            if (device, direction) not in self._streams:
                self._streams[device, direction] = torch.Stream(device)
            return self._streams[device, direction]

    def copied_beside(self, call: NamedCall, copies: Sequence[HostCopy]) -> None:
        """Remember copies that run beside a call."""
        with self._lock:
            self._beside[call] += copies

    def ended(self, call: NamedCall) -> list[HostCopy]:
        """A call has ended: what was copied beside it needs no memory of the device any more."""
        with self._lock:
            copies = self._beside.pop(call, [])
        for copy in copies:
            copy.free()
        return copies

    def forget(self) -> None:
        """A step is over, or a new one begins: whatever still waits for a call waits in vain."""
        with self._lock:
            self._beside.clear()


class HostCopy:
    """One storage of a region in the host's memory."""

    def __init__(self, memory: HostMemory, storage: torch.UntypedStorage) -> None:
        """Begin to copy a storage to the host."""
        self._memory = memory
        self._size, self._device = storage.nbytes(), storage.device
        self._on_stream = has_streams(self._device)
        self._fetched: torch.Tensor | None = None
        self._out: Any = None
        self._back: Any = None
        with torch.no_grad():
            empty = torch.empty(0, dtype=torch.uint8, device=self._device)
            source = empty.set_(storage, 0, (self._size,), (1,))
            self._source: torch.Tensor | None = source
            self._buffer = memory.take(source)
            self._out = self._copy(self._buffer.bytes, source, "out")

    def __del__(self) -> None:
        """Let the host's memory be used again."""
        if hasattr(self, "_buffer"):  # not if there was no memory
            self._memory.give_back(self._buffer)

    def _copy(self, into: torch.Tensor, source: torch.Tensor, direction: str) -> Any:
        """Copy after all that was computed so far; returns when it is done, as an event of its stream."""
        if not self._on_stream:
            into.copy_(source)
            return None
        stream = self._memory.stream(self._device, direction)
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        if self._buffer.last is not None:
            stream.wait_event(self._buffer.last)
        with stream:
            into.copy_(source, non_blocking=True)
            self._buffer.last = stream.record_event()
        return self._buffer.last

    def _wait_for(self, event: Any) -> None:
        if event is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)

    def free(self) -> None:
        """Hand the device's memory back, after the copy: what is computed from here on may use it."""
        if self._source is not None:
            self._wait_for(self._out)
            self._source = None

    def fetch(self) -> None:
        """Begin to bring it back, as it was when its region ended: whoever has the original may change it."""
        if self._fetched is not None:
            return
        self.free()
        with torch.no_grad():
            self._fetched = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            self._back = self._copy(self._fetched, self._buffer.bytes, "back")

    def taken(self) -> torch.Tensor:
        """Return its bytes on the device, which are the caller's from here on."""
        self.fetch()
        self._wait_for(self._back)
        fetched, self._fetched = self._fetched, None
        assert fetched is not None
        return fetched
