"""The ledger of a capture: every storage, who holds it, and the bytes alive at each moment.

Time is the number of operators recorded so far: a storage allocated at 7 and freed at 9 is alive while
operators 7 and 8 run. A storage has two kinds of holders. The *program* holds it through any tensor:
Python variables, gradients, the autograd engine's buffers. *Autograd* holds it as saved for backward; the
saved-tensor hooks keep only metadata (see `autograd.py`), so the moment the program alone lets go is seen
separately from the moment the memory is really freed.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field

import torch

from trainfit.capturing.hollow import hollow_storage, is_absent, storage_over, tensor_over
from trainfit.capturing.plain_tensors import strided_parts
from trainfit.traces.memory_model import EXACT, MemoryModel
from trainfit.traces.trace import COMPUTE

OUTSIDE = "outside"
"""Producer of storages that the capture did not make: real memory that belongs to the user."""
storage_address = torch._C._storage_id  # type: ignore[attr-defined]


@dataclass(slots=True, eq=False)
class Hold:
    """One holder's hold on a storage: from `start` to `end` (None while it lasts)."""

    start: int
    end: int | None = None


@dataclass(slots=True, eq=False)
class LiveStorage:
    """A storage during capture. Lives longer than the torch storage while autograd has it saved."""

    nbytes: int
    start: int
    producer: str
    initial_bytes: int = 0
    storage_bytes: int = 0
    """Size of the torch storage itself; `nbytes` is what it asks of the device: 0 if it is elsewhere."""
    stream: str = COMPUTE
    """The stream that it was made on."""
    also_used_on: list[str] = field(default_factory=list)
    """Streams that `record_stream` named."""
    producer_op: int = -1
    index: int = -1
    born: tuple[str, int] | None = None
    """In which phase of an earlier run it was made, and after how many of the phase's operators."""
    end: int | None = None
    holders: int = 0
    program: list[Hold] = field(default_factory=list)
    saved: list[Hold] = field(default_factory=list)
    gradient_since: int | None = None
    was_gradient: bool = False
    """Whether an optimizer found it as a `.grad`, in this run or an earlier one."""
    exchanged: bool = False
    """Whether it was made to be exchanged with other processes."""
    first_writer: str = ""
    """The operator that wrote to it first, after the one that made it."""
    resizes: list[tuple[int, int]] = field(default_factory=list)
    resized_to: int | None = None
    """The size that the program last gave the storage, if it ever resized it."""
    reference: _StorageReference | None = None
    backing: torch.Tensor | None = None
    """Real memory with this storage's bytes, for small storages; None when hollow."""
    known: bool = False
    """Whether the memory holds the values that a real run would have."""
    _filled: torch.Tensor | None = None
    """Which bytes do, while others have not been written yet; None if no part was written alone."""
    _missing_bytes: int = 0
    assumption: str | None = None
    """What was assumed to get the values, when they are not the real run's."""
    on_host: bool = False
    """For a GPU: whether the memory is on the host, and does not count."""
    undecided: bool = False
    """Whether the values are tests of unknown data: "do all hold?" is then yes, "does any?" is no."""
    constant: float | None = None
    """The one value that all elements have, where the memory is too large to be real."""

    def covered_by(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor over this storage has all of its bytes."""
        return tensor.numel() * tensor.element_size() == self.storage_bytes

    def fill(self, tensor: torch.Tensor) -> None:
        """Note that the elements of `tensor` got known values: all are known when no byte is missing."""
        if self.known or self.covered_by(tensor):
            self.known = True
            return
        if self._filled is None:
            self._filled = torch.zeros(self.storage_bytes, dtype=torch.bool)
            self._missing_bytes = self.storage_bytes
        item = tensor.element_size()
        part = self._filled.as_strided(
            (*tensor.shape, item),
            (*(stride * item for stride in tensor.stride()), 1),
            int(tensor.storage_offset()) * item,
        )
        self._missing_bytes -= part.numel() - int(part.sum())
        part.fill_(True)
        self.known = self._missing_bytes == 0

    def forget(self) -> None:
        """Note that unknown values were written."""
        self.known, self._filled, self.constant = False, None, None


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    """Notices when the last tensor over a storage is freed."""

    __slots__ = ("address", "hold", "live")
    live: LiveStorage
    hold: Hold
    address: int


class Ledger:
    """Registers storages, notices their release, and keeps the running total of live bytes."""

    def __init__(self, memory: MemoryModel = EXACT) -> None:
        """Start empty, at time 0; `memory` says what bytes asked for take on the device."""
        self.clock = 0
        self.live_bytes = 0
        self.most_bytes = 0
        """The most that was alive at once since `forget_most`, for code that asks."""
        self.alive: dict[int, LiveStorage] = {}
        self.created: list[LiveStorage] = []
        self.releases: list[LiveStorage] = []
        """What was freed or made smaller during the recording, in order."""
        self._by_address: dict[int, LiveStorage] = {}
        self.lock = threading.RLock()
        """Held while an operator makes its storages and is recorded, and while something is released: any
        thread of the step may do so at any time."""
        self.host_by_default = False
        """For a GPU: whether what is made without a device is on the host, as in a real run."""
        self.memory = memory
        self.stream = COMPUTE
        """The stream that the program is on."""
        self._thread = threading.local()

    @property
    def on_host(self) -> bool | None:
        """For a GPU: whether what this thread makes now is on the host; None where its inputs decide."""
        return getattr(self._thread, "on_host", None)

    @on_host.setter
    def on_host(self, on_host: bool | None) -> None:
        self._thread.on_host = on_host

    def restart_clock(self) -> None:
        """Begin a new recording at time 0; what is alive now becomes persistent (start -1)."""
        self.clock = 0
        self.created = list(self.alive.values())
        self.releases = []
        for live in self.created:
            live.start = live.producer_op = live.index = -1
            live.program = _still_held(live.program)
            live.saved = _still_held(live.saved)
            live.initial_bytes = live.nbytes
            live.resizes = []
            live.gradient_since = None

    def forget_most(self) -> None:
        """Forget the largest total so far."""
        self.most_bytes = self.live_bytes

    def find(self, tensor: torch.Tensor) -> LiveStorage | None:
        """Return the entry of a tensor's storage, if it has one."""
        return self._by_address.get(storage_address(tensor))

    def is_gradient(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is a gradient, whoever made it."""
        for live in filter(None, map(self.find, strided_parts(tensor))):
            live.was_gradient = True

    def find_storage(self, storage: torch.UntypedStorage) -> LiveStorage | None:
        """Return the entry of a storage, if it has one."""
        return self._by_address.get(storage._cdata)

    def allocate(
        self, nbytes: int, producer: str, *, keep_values: bool
    ) -> tuple[LiveStorage, torch.UntypedStorage]:
        """Make a new storage: hollow, or with real memory behind it when `keep_values`."""
        if keep_values:
            return self.adopt(torch.empty(nbytes, dtype=torch.uint8), producer, known=False)
        live = LiveStorage(nbytes, self.clock, producer)
        storage = hollow_storage(nbytes)
        self._enter(live, storage)
        return live, storage

    def adopt(
        self, real: torch.Tensor, producer: str, *, known: bool, without_device: bool = False
    ) -> tuple[LiveStorage, torch.UntypedStorage]:
        """Make a new storage over the memory of `real`, which the entry keeps alive."""
        backing = real.untyped_storage()
        # What torch's CPU allocator does not own (a NumPy array) it does not count. For a GPU it is a copy.
        is_foreign = self.memory is EXACT and not backing.resizable()
        nbytes = 0 if is_foreign else backing.nbytes()
        live = LiveStorage(nbytes, self.clock, producer, backing=real, known=known)
        storage = storage_over(backing)
        self._enter(live, storage, without_device=without_device)
        return live, storage

    def register(
        self,
        tensor: torch.Tensor,
        producer: str,
        *,
        known: bool,
        without_device: bool = True,
        counts: bool = True,
    ) -> LiveStorage:
        """Enter a storage that torch made without an operator call (a loaded file, an older tensor).

        What does not count is memory that belongs to something else than torch.
        """
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes() if counts and not is_absent(storage) else 0
        live = LiveStorage(nbytes, self.clock, producer, known=known)
        self._enter(live, storage, without_device=without_device)
        return live

    def observe(self, tensor: torch.Tensor, producer: str, nbytes: int) -> LiveStorage:
        """Enter a storage that real or fake code has made, as a block of `nbytes`."""
        live = LiveStorage(nbytes, self.clock, producer)
        self._enter(live, tensor.untyped_storage())
        return live

    def tensor(
        self, live: LiveStorage, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """Return a tensor over `live`, making the torch storage again if the program has let go of it."""
        storage = live.reference() if live.reference is not None else None
        if storage is None:
            if live.backing is not None:
                storage = storage_over(live.backing.untyped_storage())
            else:
                storage = hollow_storage(live.storage_bytes)
            self._hold(live, storage)
        return tensor_over(storage, dtype, size, stride, offset)

    def save(self, live: LiveStorage) -> Hold:
        """Autograd begins to hold `live`."""
        hold = Hold(self.clock)
        live.saved.append(hold)
        live.holders += 1
        return hold

    def release_saved(self, live: LiveStorage, hold: Hold) -> None:
        """Autograd lets go of one saved tensor."""
        with self.lock:
            hold.end = self.clock
            self._release(live)

    def resize(self, live: LiveStorage, nbytes: int) -> None:
        """Change a storage's size in place, as FSDP does to free and restore parameters."""
        live.resized_to = nbytes
        if nbytes < live.nbytes:
            self.releases.append(live)
        self.live_bytes += self.memory.occupied(nbytes) - self.memory.occupied(live.nbytes)
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        live.nbytes = nbytes
        live.resizes.append((self.clock, nbytes))

    def _enter(
        self, live: LiveStorage, storage: torch.UntypedStorage, *, without_device: bool = False
    ) -> None:
        self.created.append(live)
        self.alive[id(live)] = live
        live.storage_bytes = storage.nbytes()
        live.stream = self.stream
        on_host = self.on_host
        if on_host or (on_host is None and without_device and self.host_by_default):
            live.on_host, live.nbytes = True, 0
        self.live_bytes += self.memory.occupied(live.nbytes)
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        live.initial_bytes = live.nbytes
        self._hold(live, storage)

    def _hold(self, live: LiveStorage, storage: torch.UntypedStorage) -> None:
        reference = _StorageReference(storage, self._storage_died)
        reference.live = live
        reference.hold = Hold(self.clock)
        reference.address = storage._cdata
        live.reference = reference
        live.program.append(reference.hold)
        live.holders += 1
        self._by_address[reference.address] = live

    def _storage_died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(reference, _StorageReference)
        live = reference.live
        with self.lock:
            if self._by_address.get(reference.address) is live:
                del self._by_address[reference.address]
            reference.hold.end = self.clock
            self._release(live)

    def _release(self, live: LiveStorage) -> None:
        live.holders -= 1
        if live.holders == 0:
            live.end = self.clock
            live.backing = None
            del self.alive[id(live)]
            self.releases.append(live)
            self.live_bytes -= self.memory.occupied(live.nbytes)


def _still_held(holds: list[Hold]) -> list[Hold]:
    """Drop what has ended and let the rest begin before the recording."""
    kept = [hold for hold in holds if hold.end is None]
    for hold in kept:
        hold.start = -1
    return kept
