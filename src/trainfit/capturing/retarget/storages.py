"""Storages that move between the host and a GPU that is not there: `torch.load`, `storage.cuda()`.

Storages are not tensors, and function modes do not see them. What is loaded without naming a GPU is on the
host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from trainfit.capturing.hollow import tensor_over
from trainfit.capturing.ledger import OUTSIDE
from trainfit.capturing.replacing import replaced
from trainfit.capturing.without_operators import cloned

if TYPE_CHECKING:
    from trainfit.capturing.dispatch import CaptureMode


@contextlib.contextmanager
def moving_storages(mode: CaptureMode) -> Iterator[None]:
    """Let storages move, and let loaded ones be where they are asked for."""
    storage = torch.UntypedStorage
    with (
        replaced(storage, "to", lambda original: _to(mode, original)),
        replaced(storage, "cuda", lambda _: lambda self, *args, **kwargs: _moved(mode, self, on_host=False)),
        replaced(storage, "cpu", lambda _: lambda self: _moved(mode, self, on_host=True)),
        replaced(torch.serialization, "_get_restore_location", lambda original: _restoring(mode, original)),
    ):
        yield


def _to(mode: CaptureMode, original: Any) -> Any:
    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
        kind = torch.device(device).type
        if kind not in ("cpu", "cuda"):
            return original(self, device=device, non_blocking=non_blocking)
        return _moved(mode, self, on_host=kind == "cpu")

    return to


def _restoring(mode: CaptureMode, original: Any) -> Any:
    def get_restore_location(map_location: Any) -> Any:
        restore = original(map_location)

        def restore_location(storage: torch.UntypedStorage, location: str) -> Any:
            restored = restore(storage, location)
            if isinstance(restored, torch.UntypedStorage) and restored.device.type == "cpu":
                _entered(mode, restored, on_host=True)
            return restored

        return restore_location

    return get_restore_location


def _moved(mode: CaptureMode, storage: torch.UntypedStorage, *, on_host: bool) -> torch.UntypedStorage:
    """Return the storage where it is asked for: itself if it is there, or if nothing has used it yet."""
    live = mode.ledger.find_storage(storage)
    if live is None:
        _entered(mode, storage, on_host=on_host)
        return storage
    if live.on_host == on_host:
        return storage
    with made_on(mode, on_host=on_host):
        return cloned(mode, storage)


def _entered(mode: CaptureMode, storage: torch.UntypedStorage, *, on_host: bool) -> None:
    if mode.ledger.find_storage(storage) is not None:
        return
    floats = storage.nbytes() // 4
    with torch.utils._python_dispatch._disable_current_modes(), made_on(mode, on_host=on_host):
        tensor = tensor_over(storage, torch.uint8, (storage.nbytes(),), (1,), 0)
        mode.ledger.register(tensor, OUTSIDE, known=mode.values.worth_knowing(torch.float32, floats))


@contextlib.contextmanager
def made_on(mode: CaptureMode, *, on_host: bool) -> Iterator[None]:
    """Count what this thread makes as on the host, or on the GPU."""
    before, mode.ledger.on_host = mode.ledger.on_host, on_host
    try:
        yield
    finally:
        mode.ledger.on_host = before
