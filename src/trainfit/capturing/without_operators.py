"""What Python code does to tensors without an operator call: allocate, read values, copy a storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainfit.capturing.metadata import Call, Key
from trainfit.capturing.schemas import not_an_operator
from trainfit.capturing.waiting import read_without_operator

if TYPE_CHECKING:
    from trainfit.capturing.dispatch import CaptureMode


def allocated(mode: CaptureMode, tensor: torch.Tensor, producer: str) -> torch.Tensor:
    """Record a tensor that torch made without an operator call, as if one had made it."""
    key: Key = (producer, tensor.dtype, tensor.shape)
    with mode.ledger.lock:
        live = mode.ledger.register(tensor, producer, known=True)
        mode.recorder.record(_no_kernel(mode, producer, key), (), (), (live,))
    return tensor


def readable(mode: CaptureMode, tensor: torch.Tensor, reader: str) -> torch.Tensor:
    """Return `tensor` if its values are known, else zeros of its shape, with a warning."""
    live = mode.ledger.find(tensor) if torch._C._has_storage(tensor) else None
    if live is None:
        return tensor
    read_without_operator(mode, reader, tensor, live)
    if live.known:
        mode.values.rely_on(live)
        return tensor
    mode.values.assume(f"{tensor.numel()} values that depend on data were read and assumed to be zero")
    with torch.utils._python_dispatch._disable_current_modes():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)


def cloned(mode: CaptureMode, storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Copy a storage as `copy.deepcopy` of a tensor does."""
    ledger, name = mode.ledger, "storage.clone"
    source = ledger.find_storage(storage)
    with ledger.lock, torch.utils._python_dispatch._disable_current_modes():
        if source is None or source.backing is None:
            live, copy = ledger.allocate(storage.nbytes(), name, keep_values=False)
        else:
            real = torch.empty(0, dtype=torch.uint8).set_(source.backing.untyped_storage()).clone()
            live, copy = ledger.adopt(real, name, known=source.known)
            live.assumption = source.assumption
        call = _no_kernel(mode, name, (name, live.nbytes))
        mode.recorder.record(call, (source,) if source else (), (), (live,))
    return copy


def _no_kernel(mode: CaptureMode, name: str, key: Key) -> Call:
    """Return the call of something that is not an operator: no kernel runs, so there is no workspace."""
    workspace = 0 if mode.measures_workspaces else None
    return mode.oracle.without_results(not_an_operator(name), key, workspace)
