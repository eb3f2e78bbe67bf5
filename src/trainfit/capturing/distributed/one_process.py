"""Functions of `torch.distributed` that are replaced while a capture runs, each with its reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from trainfit.capturing.distributed.collective_calls import waits_seen
from trainfit.capturing.replacing import replaced

if TYPE_CHECKING:
    from trainfit.capturing.session import Session


@contextlib.contextmanager
def in_one_process(session: Session) -> Iterator[None]:
    """Install all replacements for the length of a capture."""
    session.recorder.queues.waits_are_seen = True
    with contextlib.ExitStack() as stack:
        stack.enter_context(waits_seen(session))
        stack.enter_context(
            replaced(ShardingPropagator, "_propagate_tensor_meta_non_cached", _without_modes)
        )
        yield


def _without_modes(original: Any) -> Any:
    """Let a function compute on fake tensors of its own: what it makes is no part of the step."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            return original(*args, **kwargs)

    return call
