"""Where the host waits for a GPU: it reads a value, needs a size that only the device knows, or copies.

What Python reads is recorded as an op of the step, on every device: it may decide what comes next. On a CPU
nothing waits. What lies on the host itself (the counters of an optimizer) can be read without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from trainfit.capturing.metadata import Call, Key
from trainfit.capturing.recorder import OPTIMIZER
from trainfit.capturing.schemas import SIZED_BY_VALUES_OVERLOADS, aten, not_an_operator

if TYPE_CHECKING:
    from trainfit.capturing.dispatch import CaptureMode
    from trainfit.capturing.ledger import LiveStorage

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


def note_wait(mode: CaptureMode, func: OpOverload, args: Arguments, kwargs: Keywords) -> None:
    """Note whether the operator that has just been recorded makes the host wait."""
    waits = _WAITS_BY_ID.get(id(func))
    if waits is not None and args[0].layout is torch.strided and waits(mode, args, kwargs):
        mode.recorder.host_waits()


def note_read(mode: CaptureMode, call: Call, lives: Sequence[LiveStorage]) -> None:
    """Record that Python reads the values of storages."""
    contexts = mode.recorder.contexts
    # Counters of an optimizer are on the host also for a GPU, and reading them is part of its ops' time.
    own_counter = bool(contexts) and contexts[-1][0] is OPTIMIZER and not mode.for_gpu
    if all(live.on_host for live in lives) or own_counter:
        return
    mode.recorder.record(call, lives, (), ())
    mode.recorder.rows[-1].reads_value = True
    if mode.for_gpu:
        mode.recorder.host_waits()


def read_without_operator(mode: CaptureMode, name: str, tensor: torch.Tensor, live: LiveStorage) -> None:
    """Record that Python reads a tensor without an operator call."""
    key: Key = (name, (tensor.dtype, tensor.shape, tensor.stride()))
    note_read(mode, mode.oracle.without_results(not_an_operator(name), key), (live,))


def note_synchronisation(mode: CaptureMode) -> None:
    """Record that the program waits for the device without reading a value."""
    name = "torch.synchronize"
    mode.recorder.record(mode.oracle.without_results(not_an_operator(name), (name,)), (), (), ())
    mode.recorder.host_waits()


def _on_device(mode: CaptureMode, args: Arguments, kwargs: Keywords) -> bool:
    """Whether the result's size depends on values that are on the device."""
    return not mode.live(args[0]).on_host


def _repeats(mode: CaptureMode, args: Arguments, kwargs: Keywords) -> bool:
    return kwargs.get("output_size") is None and _on_device(mode, args, kwargs)


def _by_mask(mode: CaptureMode, args: Arguments, kwargs: Keywords) -> bool:
    """Whether an indexing has to count the true elements of a mask."""
    return any(is_mask(index) and not mode.live(index).on_host for index in args[1])


def _put_by_mask(mode: CaptureMode, args: Arguments, kwargs: Keywords) -> bool:
    """Like indexing; but one value, put where a single mask is true, is a fill that needs no positions."""
    indices, values = args[1], args[2]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    given = [index for index in indices if index is not None]
    is_fill = not accumulate and values.numel() == 1 and len(given) == 1 and is_mask(given[0])
    return not is_fill and _by_mask(mode, args, kwargs)


def is_mask(index: Any) -> bool:
    """Whether an index is a mask, whose true elements have to be counted."""
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _copies_between(mode: CaptureMode, args: Arguments, kwargs: Keywords) -> bool:
    """Whether values are copied between host and device, and the program did not ask for no waiting."""
    non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    return not non_blocking and mode.live(args[0]).on_host != mode.live(args[1]).on_host


_WAITS: dict[OpOverload, Callable[[CaptureMode, Arguments, Keywords], bool]] = {
    **dict.fromkeys(SIZED_BY_VALUES_OVERLOADS, _on_device),
    aten.repeat_interleave.Tensor: _repeats,
    aten.index.Tensor: _by_mask,
    aten.index_put.default: _put_by_mask,
    aten.index_put_.default: _put_by_mask,
    aten._index_put_impl_.default: _put_by_mask,
    aten._ctc_loss.Tensor: _on_device,
    aten._linalg_check_errors.default: _on_device,
    aten.copy_.default: _copies_between,
}
# Torch hashes operators in Python, which would take longer than everything else here.
_WAITS_BY_ID = {id(func): waits for func, waits in _WAITS.items()}
