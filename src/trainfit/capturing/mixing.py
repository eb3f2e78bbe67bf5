"""Operators that get tensors of the GPU and of the host at once: torch refuses most of them."""

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
