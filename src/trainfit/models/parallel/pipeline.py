"""A step that runs one stage of a pipeline: micro-batches of one sample, one forward, one backward (1F1B).

Each stage gets the activations of the stage before and sends its own on; in backward the same with their
gradients (Narayanan et al. 2019, PipeDream).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

from trainfit.errors import OptionError
from trainfit.models.recipe import StepOptions, make_optimizer
from trainfit.steps.step import Step, count_inputs

PairLoss = Callable[[Tensor, Tensor], Tensor]
"""Takes logits and labels."""


@dataclass(frozen=True)
class Handover:
    """What the stages hand to each other, for one micro-batch of one sample, and what is made of the last."""

    hidden: tuple[int, ...]
    """The shape of what a stage sends on."""
    logits: tuple[int, ...]
    dtype: torch.dtype
    loss: PairLoss
    """Of a micro-batch."""


def refuse_few_samples(stages: int, options: StepOptions) -> None:
    """Refuse a batch that leaves stages without a micro-batch of their own."""
    if (options.batch or 0) < stages:
        raise OptionError(
            f"--batch {options.batch} in a pipeline of {stages} stages: each stage works on a micro-batch of "
            f"one sample, so there have to be at least {stages} of them; add --batch {2 * stages} or more."
        )


def stage_blocks(count: int, number: int, stages: int) -> range:
    """Return the blocks of one stage; where they cannot be divided evenly, later stages have more.

    The last stage also has the head, but the first has the embedding and holds the most micro-batches.
    """
    return range(count * number // stages, count * (number + 1) // stages)


@dataclass(frozen=True)
class StageModule:
    """What a rank runs in a pipeline."""

    part: nn.Module
    tied: nn.Module | None = None
    """Of the first and of the last stage, the module whose weight both have."""
    sequence_parts: int = 1
    """Among how many ranks each sequence is divided."""


def pipeline_step(
    stage_module: StageModule,
    mesh: DeviceMesh,
    inputs: Mapping[str, Any],
    handover: Handover,
    options: StepOptions,
    around: Callable[[], AbstractContextManager[None]],
) -> Step:
    """Return the step of a stage; `mesh` has the ranks of the pipeline.

    Forward and backward run inside of `around`, where the inputs are this rank's part of each sequence.
    """
    part = stage_module.part
    number, stages = mesh.get_local_rank(), mesh.size()
    given, labels = (value for value in inputs.values())
    received = torch.Size((1, given.shape[1] // stage_module.sequence_parts, *given.shape[2:]))
    is_first, is_last = number == 0, number == stages - 1
    hidden = _example(handover.hidden, handover.dtype)
    stage = PipelineStage(
        part,
        number,
        stages,
        torch.device(options.device),
        input_args=_example(received, given.dtype) if is_first else hidden,
        output_args=_example(handover.logits, handover.dtype) if is_last else hidden,
        group=mesh.get_group(),
    )
    schedule = Schedule1F1B(stage, n_microbatches=len(given), loss_fn=handover.loss)
    optimizer = make_optimizer(part, options.optimizer)
    add_up = _both_ends(stage_module.tied, mesh)

    def run() -> Tensor | None:
        losses: list[Tensor] = []
        with around():
            # The logits of all micro-batches, put together, are nothing that training needs.
            schedule.step(
                *((given,) if is_first else ()),
                target=labels if is_last else None,
                losses=losses,
                return_outputs=False,
            )
        add_up()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            part.zero_grad()
        return torch.stack(losses).mean() if losses else None

    samples, tokens = count_inputs(inputs)
    return Step(model=part, optimizer=optimizer, run=run, samples=samples, tokens=tokens)


def _both_ends(tied: nn.Module | None, mesh: DeviceMesh) -> Callable[[], None]:
    """Return what adds up the gradients of a weight that the first and the last stage have a copy of each.

    So the two stay the same (as in Shoeybi et al. 2019, Megatron-LM). Which part of it a rank has is the same
    on both stages.
    """
    if tied is None:
        return lambda: None
    ranks = dist.get_process_group_ranks(mesh.get_group())
    # Without the other ranks, of which there may be thousands. torch finds such a group by how many groups a
    # rank has: both ends have to have as many, as they do unless the process had other models before.
    group = dist.new_group(
        [ranks[0], ranks[-1]], use_local_synchronization=True, group_desc="first and last stage"
    )

    def add_up() -> None:
        weight = tied.get_parameter("weight")
        assert weight.grad is not None, "both stages use it"
        if isinstance(weight, DTensor) and isinstance(weight.grad, DTensor):
            # An embedding's may be divided otherwise than its weight, and than the head's.
            weight.grad = weight.grad.redistribute(placements=weight.placements)
            dist.all_reduce(weight.grad.to_local(), group=group)
        else:
            dist.all_reduce(weight.grad, group=group)

    return add_up


def _example(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # Given by hand, so that the stages need not ask each other before the first step.
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
