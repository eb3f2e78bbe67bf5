"""Stages of a pipeline tell each other the shapes of what they exchange, as objects, in their first step.

The stage before is another rank. What it would say is found by building the step as that rank and running it
until it says it. The stage behind says what gradients look like: like the outputs.

Schedules set their stages up in the first step, with a vote and a run of the model for its shapes. What is
read from tensors meanwhile is read once: later steps are not different because they do not read it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining import stage as stages

from trainfit.capturing.distributed.rank_messages import Messages, RankHasSpoken
from trainfit.capturing.replacing import replaced, while_set
from trainfit.capturing.values import Values

_stages: Any = stages
_schedules: Any = schedules


@contextlib.contextmanager
def stages_of(rank: int, messages: Messages, listener: int | None, values: Values) -> Iterator[None]:
    """Let the stages of a rank exchange shapes; with a `listener`, only until it has been told."""
    with contextlib.ExitStack() as stack:
        stage, schedule = _stages.PipelineStage, _schedules._PipelineSchedule
        stack.enter_context(replaced(schedule, "_initialize_pp_stages", lambda o: _setting_up(values, o)))
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


def _setting_up(values: Values, original: Any) -> Any:
    def initialize_pp_stages(self: Any, *args: Any, **kwargs: Any) -> Any:
        with while_set(values, "answers", []):
            return original(self, *args, **kwargs)

    return initialize_pp_stages
