"""What a step saved, without its bytes: structure and metadata, and values only where they are known.

The ledger does not see a snapshot, as it would not see a file. `restored` makes new storages, as loading
does.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.storage import TypedStorage

from trainfit.capturing.hollow import hollow_storage, tensor_over
from trainfit.capturing.without_operators import allocated

if TYPE_CHECKING:
    from trainfit.capturing.session import Session

_PRODUCER = "torch.load"


@dataclass(frozen=True, slots=True)
class _SavedStorage:
    nbytes: int
    location: str
    values: torch.Tensor | None
    """A copy of the bytes, if they are known."""
    assumption: str | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A pickle in which storages are numbers, and the storages."""

    pickled: bytes
    storages: tuple[_SavedStorage, ...]

    @property
    def nbytes(self) -> int:
        """Roughly the size of the file that a real run would have written."""
        return len(self.pickled) + sum(storage.nbytes for storage in self.storages)


@dataclass(frozen=True, slots=True)
class TensorOnDisk:
    """One tensor of a file of safetensors."""

    snapshot: Snapshot
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A file of safetensors: tensors that are loaded one by one."""

    tensors: dict[str, TensorOnDisk]
    metadata: dict[str, str] | None

    @property
    def nbytes(self) -> int:
        """Roughly the size of the file that a real run would have written."""
        return sum(saved.snapshot.nbytes for saved in self.tensors.values())


def tensors_taken(session: Session, tensors: Any, metadata: Any) -> TensorFile:
    """Return a snapshot of each tensor of a file of safetensors."""
    saved = {
        name: TensorOnDisk(taken(session, tensor), tensor.dtype, tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    return TensorFile(saved, None if metadata is None else dict(metadata))


def taken(session: Session, thing: Any) -> Snapshot:
    """Return a snapshot of any picklable object; raises what pickling it raises in a real run."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, session)
    with torch._C.DisableTorchFunction():
        pickler.dump(thing)
    return Snapshot(buffer.getvalue(), tuple(pickler.saved))


def restored(session: Session, snapshot: Snapshot, map_location: Any = None) -> Any:
    """Return the object again, over new storages where `map_location` says."""
    return _Unpickler(session, snapshot, map_location).load()


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, session: Session) -> None:
        super().__init__(buffer, protocol=4)
        self._session = session
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []
        self.saved: list[_SavedStorage] = []

    def persistent_id(self, thing: Any) -> Any:
        if isinstance(thing, TypedStorage):
            return self._number(thing._untyped_storage), thing.dtype
        if isinstance(thing, torch.UntypedStorage):
            return self._number(thing), None
        return None

    def _number(self, storage: torch.UntypedStorage) -> int:
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self.saved)
            self.saved.append(_saved(self._session, storage))
            self._alive.append(storage)  # otherwise another storage might get its address
        return number


def _saved(session: Session, storage: torch.UntypedStorage) -> _SavedStorage:
    live = session.ledger.find_storage(storage)
    host = session.device == "cpu" or (live is not None and live.on_host)
    values = None
    if live is None or live.known:
        with torch.utils._python_dispatch._disable_current_modes():
            values = tensor_over(storage, torch.uint8, (storage.nbytes(),), (1,), 0).clone()
    assumption = live.assumption if live is not None else None
    return _SavedStorage(storage.nbytes(), "cpu" if host else "cuda:0", values, assumption)


class _Unpickler(pickle.Unpickler):
    def __init__(self, session: Session, snapshot: Snapshot, map_location: Any) -> None:
        super().__init__(io.BytesIO(snapshot.pickled))
        self._session = session
        self._snapshot = snapshot
        self._place = torch.serialization._get_restore_location(map_location)
        self._made: dict[int, torch.UntypedStorage] = {}

    def persistent_load(self, identity: tuple[int, torch.dtype | None]) -> Any:
        number, dtype = identity
        if number not in self._made:
            self._made[number] = self._make(self._snapshot.storages[number])
        untyped = self._made[number]
        if dtype is None:
            return untyped
        return TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)

    def _make(self, saved: _SavedStorage) -> torch.UntypedStorage:
        mode = self._session.mode
        with torch.utils._python_dispatch._disable_current_modes():
            if saved.values is None:
                storage = hollow_storage(saved.nbytes)
            else:
                storage = saved.values.clone().untyped_storage()
            placed: torch.UntypedStorage = self._place(storage, saved.location)
            tensor = tensor_over(placed, torch.uint8, (saved.nbytes,), (1,), 0)
        live = mode.ledger.find(tensor)
        if live is None:
            allocated(mode, tensor, _PRODUCER)
            live = mode.live(tensor)
        else:
            live.producer = _PRODUCER  # entered when it was placed on the GPU or the host
        live.known, live.assumption = saved.values is not None, saved.assumption
        return placed
