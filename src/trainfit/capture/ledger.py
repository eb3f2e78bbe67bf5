"""The ledger of a capture: every storage, who holds it, and the bytes alive at each moment.

Time is the number of operators recorded so far: a storage that is born at 7 and freed at 9 is alive while
operators 7 and 8 run. A storage has two kinds of holders. The *program* holds it through any tensor:
Python variables, gradients, the autograd engine's buffers. *Autograd* holds it as saved for backward; the
saved-tensor hooks keep only metadata (see `autograd.py`), so the moment the program alone lets go is seen
separately from the moment the memory is really free.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from trainfit.capture.hollow import hollow_storage, storage_over, tensor_over

storage_address = torch._C._storage_id  # type: ignore[attr-defined]


@dataclass(slots=True, eq=False)
class SavedInterval:
    """One tensor saved for backward: held by autograd from `start` to `end` (None while held)."""

    start: int
    end: int | None = None


@dataclass(slots=True, eq=False)
class LiveStorage:
    """A storage during capture. Lives longer than the torch storage while autograd has it saved."""

    nbytes: int
    born: int
    producer: str
    category: str | None = None
    producer_op: int = -1
    index: int = -1
    program_end: int | None = None
    freed: int | None = None
    holders: int = 0
    saved: list[SavedInterval] = field(default_factory=list)
    gradient_since: int | None = None
    resizes: list[tuple[int, int]] = field(default_factory=list)
    reference: weakref.ref[torch.UntypedStorage] | None = None
    backing: torch.Tensor | None = None
    """Real memory with this storage's bytes, for small storages; None when hollow."""
    known: bool = False
    """Whether `backing` holds the values that a real run would have."""
    assumption: str | None = None
    """What was assumed to get the values, when they are not the real run's."""
    counted: bool = True
    """False for memory that torch's allocator does not own (NumPy arrays, mapped files)."""


class _StorageReference(weakref.ref[torch.UntypedStorage]):
    __slots__ = ("address", "live")
    live: LiveStorage
    address: int


class Ledger:
    """Registers storages, notices their release, and keeps the running total of live bytes."""

    def __init__(self) -> None:
        """Start empty, at time 0."""
        self.clock = 0
        self.live_bytes = 0
        self.alive: dict[int, LiveStorage] = {}
        self.created: list[LiveStorage] = []
        self._by_address: dict[int, LiveStorage] = {}

    def restart_clock(self) -> None:
        """Begin a new recording at time 0; what is alive now becomes persistent (born at -1)."""
        self.clock = 0
        self.created = list(self.alive.values())
        for live in self.created:
            live.born = -1
            live.producer_op = -1
            live.index = -1
            live.saved = [s for s in live.saved if s.end is None]
            for saved in live.saved:
                saved.start = -1
            live.resizes = []
            live.gradient_since = None if live.gradient_since is None else -1
            live.program_end = None if live.program_end is None else -1

    def find(self, tensor: torch.Tensor) -> LiveStorage | None:
        """Return the entry of a tensor's storage, if it has one."""
        return self._by_address.get(storage_address(tensor))

    def find_storage(self, storage: torch.UntypedStorage) -> LiveStorage | None:
        """Return the entry of a storage, if it has one."""
        return self._by_address.get(storage._cdata)

    def allocate(self, nbytes: int, producer: str, *, keep_values: bool) -> tuple[LiveStorage, torch.UntypedStorage]:
        """Make a new storage: hollow, or with real memory behind it when `keep_values`."""
        if keep_values:
            return self.adopt(torch.empty(nbytes, dtype=torch.uint8), producer, known=False)
        live = LiveStorage(nbytes, self.clock, producer)
        storage = hollow_storage(nbytes)
        self._enter(live, storage)
        return live, storage

    def adopt(
        self, real: torch.Tensor, producer: str, *, known: bool
    ) -> tuple[LiveStorage, torch.UntypedStorage]:
        """Make a new storage over the memory of `real`, which the entry keeps alive."""
        backing = real.untyped_storage()
        live = LiveStorage(backing.nbytes(), self.clock, producer, backing=real, known=known)
        storage = storage_over(backing)
        self._enter(live, storage)
        return live, storage

    def register(self, tensor: torch.Tensor, producer: str, *, known: bool) -> LiveStorage:
        """Enter a storage that torch made outside our sight (a constant, a loaded or NumPy array)."""
        storage = tensor.untyped_storage()
        live = LiveStorage(storage.nbytes(), self.clock, producer, known=known)
        live.counted = storage.resizable()
        self._enter(live, storage)
        return live

    def tensor(
        self, live: LiveStorage, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        """Return a tensor over `live`, bringing the torch storage back if the program let it die."""
        storage = live.reference() if live.reference is not None else None
        if storage is None:
            if live.backing is not None:
                storage = storage_over(live.backing.untyped_storage())
            else:
                storage = hollow_storage(live.nbytes)
            self._hold(live, storage)
        return tensor_over(storage, dtype, size, stride, offset)

    def save(self, live: LiveStorage) -> SavedInterval:
        """Autograd begins to hold `live`."""
        interval = SavedInterval(self.clock)
        live.saved.append(interval)
        live.holders += 1
        return interval

    def release_saved(self, live: LiveStorage, interval: SavedInterval) -> None:
        """Autograd lets go of one saved tensor."""
        interval.end = self.clock
        self._release(live)

    def resize(self, live: LiveStorage, nbytes: int) -> None:
        """Change a storage's size in place, as FSDP does to free and restore parameters."""
        if live.counted:
            self.live_bytes += nbytes - live.nbytes
        live.nbytes = nbytes
        live.resizes.append((self.clock, nbytes))

    def _enter(self, live: LiveStorage, storage: torch.UntypedStorage) -> None:
        self.created.append(live)
        self.alive[id(live)] = live
        if live.counted:
            self.live_bytes += live.nbytes
        self._hold(live, storage)

    def _hold(self, live: LiveStorage, storage: torch.UntypedStorage) -> None:
        reference = _StorageReference(storage, self._storage_died)
        reference.live = live
        reference.address = storage._cdata
        live.reference = reference
        live.holders += 1
        self._by_address[reference.address] = live

    def _storage_died(self, reference: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(reference, _StorageReference)
        live = reference.live
        if self._by_address.get(reference.address) is live:
            del self._by_address[reference.address]
        if live.program_end is None:
            live.program_end = self.clock
        self._release(live)

    def _release(self, live: LiveStorage) -> None:
        live.holders -= 1
        if live.holders == 0:
            live.freed = self.clock
            live.backing = None
            del self.alive[id(live)]
            if live.counted:
                self.live_bytes -= live.nbytes
