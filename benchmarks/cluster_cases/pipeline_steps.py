"""Pipelines of `torch.distributed.pipelining`: each rank has a stage, and ranks differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

import trainfit

from .small_transformer import HEADS, VOCABULARY, WIDTH, TransformerBlock, start, token_batch, token_loss

MICRO_BATCHES = 4


def _part(number: int, parts: int) -> nn.Module:
    """Return one of the parts of a model: the first has the embedding, the last the output."""
    layers: list[nn.Module] = [TransformerBlock(WIDTH, HEADS) for _ in range(2)]
    if number == 0:
        layers.insert(0, nn.Embedding(VOCABULARY, WIDTH))
    if number == parts - 1:
        layers += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)]
    return nn.Sequential(*layers)


def _pipeline(
    per_rank: int, schedule_of: Callable[[list[PipelineStage]], Any], *, there_and_back: bool = False
) -> trainfit.Step:
    device = start()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = per_rank * ranks
    # Usually rank 0 has the first part, and after the last rank it goes on with rank 0; else it goes back.
    numbers = (rank, parts - 1 - rank) if there_and_back else range(rank, parts, ranks)
    model = nn.ModuleList(_part(number, parts) for number in numbers).to(device)
    stages = [PipelineStage(part, number, parts, device) for part, number in zip(model, numbers)]
    schedule = schedule_of(stages)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = token_batch(batch=8)

    def run() -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        given = (tokens,) if rank == 0 else ()
        asked = {"target": tokens, "losses": losses} if parts - 1 in numbers else {}
        schedule.step(*given, **asked)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if losses else None

    return trainfit.Step(model=model, optimizer=optimizer, run=run)


def gpipe() -> trainfit.Step:
    return _pipeline(1, lambda stages: ScheduleGPipe(stages[0], MICRO_BATCHES, loss_fn=token_loss))


def one_forward_one_backward() -> trainfit.Step:
    return _pipeline(1, lambda stages: Schedule1F1B(stages[0], MICRO_BATCHES, loss_fn=token_loss))


def interleaved() -> trainfit.Step:
    return _pipeline(2, lambda stages: ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=token_loss))


def looped_bfs() -> trainfit.Step:
    return _pipeline(2, lambda stages: ScheduleLoopedBFS(stages, MICRO_BATCHES, loss_fn=token_loss))


def zero_bubble() -> trainfit.Step:
    """Gradients of weights are computed later than those of inputs."""
    return _pipeline(
        2, lambda stages: ScheduleInterleavedZeroBubble(stages, MICRO_BATCHES, loss_fn=token_loss)
    )


def zero_bubble_there_and_back() -> trainfit.Step:
    """Rank 0 has the first part and the last."""
    return _pipeline(
        2,
        lambda stages: ScheduleZBVZeroBubble(stages, 2 * MICRO_BATCHES, loss_fn=token_loss),
        there_and_back=True,
    )
