"""The training step of one rank: a model, divided over a mesh in the order that torch's own trainers use.

First the stage of the pipeline, then experts or tensor parallelism, then data parallelism around both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from trainfit.errors import OptionError
from trainfit.models.parallel.data_parallel import copies_share
from trainfit.models.parallel.dimensions import MeshDimensions
from trainfit.models.parallel.divided_sequence import DividedSequence
from trainfit.models.parallel.exchanged_experts import exchange_experts
from trainfit.models.parallel.layout import Layout
from trainfit.models.parallel.pipeline import StageModule, pipeline_step, refuse_few_samples
from trainfit.models.recipe import StepOptions, in_parameter_dtype, training_step
from trainfit.steps.step import Loss, Step


def check_division(layout: Layout, dimensions: MeshDimensions, options: StepOptions) -> None:
    """Refuse a mesh that a step cannot be divided over, before anything is built."""
    if options.dtype == "fp16-autocast":
        raise OptionError(
            "--dtype fp16-autocast and --mesh: gradients that are scaled are not divided here; use "
            "bf16-autocast or bf16, or a function of your own."
        )
    if options.autocast_dtype and dimensions.size("pp") > 1 and not dimensions.sharded:
        raise OptionError(
            f"--dtype {options.dtype} in a pipeline: FSDP's mixed precision does it there; add a dimension "
            "fsdp (or dp) of at least 2 to --mesh, or use bf16."
        )
    layout.check(dimensions, options)
    if dimensions.size("pp") > 1:
        refuse_few_samples(dimensions.size("pp"), options)


def parallel_step(
    model: nn.Module,
    inputs: Mapping[str, Any],
    options: StepOptions,
    layout: Layout,
    dimensions: MeshDimensions,
    mesh: DeviceMesh,
    loss: Loss | None = None,
) -> Step:
    """Return the step of this rank. `inputs` are those of one copy of the model.

    With FSDP2, `bf16-autocast` is its mixed precision: parameters are gathered in bfloat16 and gradients are
    reduced in float32, without autocast.
    """
    check_division(layout, dimensions, options)
    model = in_parameter_dtype(model, options.parameter_dtype).to(options.device).train()
    pipe, tensor, context = (dimensions.of(mesh, name) for name in ("pp", "tp", "cp"))
    sequence, parts = None, 1
    if context is not None:
        sequence = DividedSequence(context, inputs, layout.sequence, one_by_one=pipe is not None)
        parts = context.size()
    if pipe is not None:
        places = {} if sequence is None else sequence.places
        model = layout.stage(model, pipe.get_local_rank(), pipe.size(), options.seq or 0, places)
    if tensor is not None:
        layout.divide_layers(model, tensor)
    experts = dimensions.of(mesh, "ep")
    if experts is not None:
        exchange_experts(model, experts)
    tied = None if pipe is None else layout.tied_end(model)
    sharded = dimensions.sharded
    if sharded or dimensions.size("replicate") > 1:
        computes_in = options.autocast_dtype if sharded else None
        model = copies_share(model, layout.blocks(model), dimensions, mesh, computes_in)
    around = _around(sequence, in_parts=layout.loss_in_parts and tensor is not None)
    if pipe is not None:
        loss_of = layout.loss if sequence is None else sequence.loss
        own = replace(options, seq=options.seq // parts) if options.seq else options
        handover = layout.handover(tensor, own, loss_of)
        if sequence is not None:
            inputs = {"tokens": sequence.tokens, "labels": sequence.labels}
        stage = StageModule(model, tied, parts)
        return pipeline_step(stage, pipe, inputs, handover, options, around)
    if sequence is not None:
        inputs, loss = sequence.inputs, _loss_of(sequence)
    return training_step(model, inputs, options, loss, around=around, autocast=not sharded)


def _around(
    sequence: DividedSequence | None, *, in_parts: bool
) -> Callable[[], AbstractContextManager[None]]:
    """Return what is around forward and backward."""

    @contextmanager
    def around() -> Iterator[None]:
        with (
            nullcontext() if sequence is None else sequence.divided(),
            loss_parallel() if in_parts else nullcontext(),
        ):
            yield

    return around


def _loss_of(sequence: DividedSequence) -> Loss:
    def loss(output: Any) -> Tensor:
        logits = output if isinstance(output, Tensor) else output.logits
        return sequence.loss(logits, sequence.labels)

    return loss
