"""Stages of a pipeline tell each other the shapes of what they exchange, as objects, in their first step.

The stage before is another rank. What it would say is found by building the step as that rank and running it
until it says it. The stage behind says what gradients look like: like the outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.pipelining import stage as stages

from trainfit.capturing.distributed.rank_messages import Messages, RankHasSpoken
from trainfit.capturing.replacing import replaced

_stages: Any = stages


@contextlib.contextmanager
def stages_of(rank: int, messages: Messages, listener: int | None) -> Iterator[None]:
    """Let the stages of a rank exchange shapes; with a `listener`, only until it has been told."""
    with contextlib.ExitStack() as stack:
        stage = _stages.PipelineStage
        stack.enter_context(replaced(stage, "_send_meta", lambda o: _sending(rank, messages, listener)))
        stack.enter_context(replaced(stage, "_recv_meta", lambda o: _receiving(rank, messages)))
        stack.enter_context(replaced(stage, "_warmup_backward_result", _voting))
        yield


def _sending(rank: int, messages: Messages, listener: int | None) -> Any:
    def send_meta(self: Any, meta: Any, dst_stage: int) -> None:
        to = self._resolve_peer_global_rank(dst_stage)
        if messages.say(rank, to, ("stage", dst_stage), meta) and to == listener:
            raise RankHasSpoken

    return send_meta


def _receiving(rank: int, messages: Messages) -> Any:
    def recv_meta(self: Any, src_stage: int) -> Any:
        if src_stage > self.stage_index:
            return _stages._StageBackwardMeta(_stages._derive_grad_metas(self._stage_meta.outputs))
        return messages.hear(self._resolve_peer_global_rank(src_stage), rank, ("stage", self.stage_index))

    return recv_meta


def _voting(original: Any) -> Any:
    # Whether all stages were given their shapes: they are taken to be alike in that.
    def warmup_backward_result(self: Any, received_result: torch.Tensor | None = None) -> torch.Tensor:
        original(self, received_result)
        own = 0 if _stages.InferenceMode.needs_dynamic(self._user_meta, self.has_backward) else 1
        return torch.tensor([own], dtype=torch.int32, device=self.device)

    return warmup_backward_result
