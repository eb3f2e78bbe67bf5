"""Operators that get tensors of the GPU and of the host at once: copies; torch refuses most others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch._ops import OpOverload

from trainfit.capturing.schemas import aten
from trainfit.capturing.values import script_line

if TYPE_CHECKING:
    from trainfit.capturing.dispatch import CaptureMode
    from trainfit.capturing.ledger import LiveStorage

_MAY_MIX = {
    aten.copy_,
    aten._to_copy,
    aten.set_,
    # Indices may be on the host.
    aten.index,
    aten.index_put,
    aten.index_put_,
    aten._index_put_impl_,
    # So may lengths; some of them have to be.
    aten._ctc_loss,
    aten._ctc_loss_backward,
    aten._pack_padded_sequence,
    aten._pack_padded_sequence_backward,
    aten.repeat_interleave,
    aten.tensor_split,
}


_COPIES = {id(aten.copy_.default), id(aten._to_copy.default)}
# Torch hashes operators in Python, which would take longer than everything else here.


def goes_over_link(func: OpOverload, lives: Sequence[LiveStorage], to_host: bool | None) -> bool:
    """Whether an operator copies between the host and the GPU; `to_host` is where it makes a new tensor."""
    if id(func) not in _COPIES or not lives:
        return False
    places = {live.on_host for live in lives}
    if func is aten._to_copy.default:
        # Without a word about it, the copy is where the original is.
        places.add(lives[0].on_host if to_host is None else to_host)
    return len(places) > 1


def note_mixed(
    mode: CaptureMode, func: OpOverload, tensors: Sequence[torch.Tensor], lives: Sequence[LiveStorage]
) -> None:
    """Note that a real run would fail here, unless the operator takes both; scalars may be anywhere."""
    if func.overloadpacket in _MAY_MIX or all(live.on_host for live in lives):
        return
    if any(live.on_host and tensor.dim() for tensor, live in zip(tensors, lives)):
        mode.values.note(
            "device",
            f"{func.overloadpacket} gets a tensor on the host and one on the GPU, which torch refuses: move "
            "the first with .to(device), or make it with device=",
            script_line(),
        )
