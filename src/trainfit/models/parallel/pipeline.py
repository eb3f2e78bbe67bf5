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
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from trainfit.errors import OptionError
from trainfit.models.recipe import StepOptions, make_optimizer
from trainfit.steps.step import Step, count_inputs

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Handover:
    """What the stages hand to each other, for one micro-batch of one sample, and what is made of the last."""

    hidden: tuple[int, ...]
    """The shape of what a stage sends on."""
    logits: tuple[int, ...]
    dtype: torch.dtype
    loss: Loss
    """Takes the logits of a micro-batch and its labels."""


def refuse_few_samples(stages: int, options: StepOptions) -> None:
    """Refuse a batch that leaves stages without a micro-batch of their own."""
    if (options.batch or 0) < stages:
        raise OptionError(
            f"--batch {options.batch} in a pipeline of {stages} stages: each stage works on a micro-batch of "
            f"one sample, so there have to be at least {stages} of them; add --batch {2 * stages} or more."
        )


def pipeline_step(
    part: nn.Module,
    mesh: DeviceMesh,
    inputs: Mapping[str, Any],
    handover: Handover,
    options: StepOptions,
    around: Callable[[], AbstractContextManager[None]],
) -> Step:
    """Return the step of the stage that `part` is; `mesh` has the ranks of the pipeline.

    Forward and backward run inside of `around`.
    """
    number, stages = mesh.get_local_rank(), mesh.size()
    given, labels = (value for value in inputs.values())
    is_first, is_last = number == 0, number == stages - 1
    hidden = _example(handover.hidden, handover.dtype)
    stage = PipelineStage(
        part,
        number,
        stages,
        torch.device(options.device),
        input_args=_example(given[:1].shape, given.dtype) if is_first else hidden,
        output_args=_example(handover.logits, handover.dtype) if is_last else hidden,
        group=mesh.get_group(),
    )
    schedule = Schedule1F1B(stage, n_microbatches=len(given), loss_fn=handover.loss)
    optimizer = make_optimizer(part, options.optimizer)

    def run() -> Tensor | None:
        losses: list[Tensor] = []
        with around():
            schedule.step(*((given,) if is_first else ()), target=labels if is_last else None, losses=losses)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        else:
            part.zero_grad()
        return torch.stack(losses).mean() if losses else None

    samples, tokens = count_inputs(inputs)
    return Step(model=part, optimizer=optimizer, run=run, samples=samples, tokens=tokens)


def _example(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # Given by hand, so that the stages need not ask each other before the first step.
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
