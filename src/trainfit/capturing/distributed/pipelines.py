"""Stages of a pipeline tell each other the shapes of what they exchange, as objects, in their first step.

The stage before is another rank. What it would say is found by building the step as that rank and running it
until it says it. The stage behind says what gradients look like: like the outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import stage as stages

from trainfit.capturing.distributed.rank_messages import Messages, RankHasSpoken
from trainfit.capturing.replacing import replaced, replaced_by_name
from trainfit.capturing.values import script_line
from trainfit.errors import CaptureError

_stages: Any = stages


@contextlib.contextmanager
def stages_of(rank: int, messages: Messages, listener: int | None) -> Iterator[None]:
    """Let the stages of a rank exchange shapes; with a `listener`, only until it has been told."""
    with contextlib.ExitStack() as stack:
        stage = _stages.PipelineStage
        stack.enter_context(replaced(stage, "_send_meta", lambda o: _sending(rank, messages, listener)))
        stack.enter_context(replaced(stage, "_recv_meta", lambda o: _receiving(rank, messages)))
        stack.enter_context(replaced(stage, "_warmup_backward_result", _voting))
        for owner in (dist, dist.distributed_c10d):
            stack.enter_context(replaced(owner, "recv_object_list", lambda o: _refuse_objects))
            stack.enter_context(replaced(owner, "send_object_list", lambda o: _nothing))
            stack.enter_context(replaced(owner, "broadcast_object_list", lambda o: _broadcast_objects))
            stack.enter_context(replaced(owner, "all_gather_object", lambda o: _gather_objects))
        stack.enter_context(replaced_by_name(dist, dist.distributed_c10d))
        yield


def _sending(rank: int, messages: Messages, listener: int | None) -> Any:
    def send_meta(self: Any, meta: Any, dst_stage: int) -> None:
        to = self._resolve_peer_global_rank(dst_stage)
        messages.say(rank, to, meta)
        if to == listener:
            raise RankHasSpoken

    return send_meta


def _receiving(rank: int, messages: Messages) -> Any:
    def recv_meta(self: Any, src_stage: int) -> Any:
        if src_stage > self.stage_index:
            return _stages._StageBackwardMeta(_stages._derive_grad_metas(self._stage_meta.outputs))
        return messages.hear(self._resolve_peer_global_rank(src_stage), rank)

    return recv_meta


def _voting(original: Any) -> Any:
    # Whether all stages were given their shapes: they are taken to be alike in that.
    def warmup_backward_result(self: Any, received_result: torch.Tensor | None = None) -> torch.Tensor:
        original(self, received_result)
        own = 0 if _stages.InferenceMode.needs_dynamic(self._user_meta, self.has_backward) else 1
        return torch.tensor([own], dtype=torch.int32, device=self.device)

    return warmup_backward_result


def _refuse_objects(*args: Any, **kwargs: Any) -> None:
    raise CaptureError(
        f"{script_line()} receives a Python object from another process, and a capture runs only one. Let "
        "each process make it itself."
    )


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Who sends an object goes on."""


def _broadcast_objects(
    object_list: list[Any],
    src: int | None = None,
    group: Any = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    """Leave the source's own objects as they are; what any other rank would get is not known."""
    is_source = dist.get_rank(group) == group_src if group_src is not None else dist.get_rank() == (src or 0)
    if not is_source:
        _refuse_objects()


def _gather_objects(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """All ranks are taken to have the same objects."""
    object_list[:] = [obj] * len(object_list)
