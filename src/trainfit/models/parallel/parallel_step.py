"""The training step of one rank: a model, divided over a mesh in the order that torch's own trainers use.

First the stage of the pipeline, then tensor parallelism, then data parallelism around both.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from trainfit.errors import OptionError
from trainfit.models.parallel.data_parallel import copies_share
from trainfit.models.parallel.dimensions import MeshDimensions
from trainfit.models.parallel.layout import Layout
from trainfit.models.parallel.pipeline import pipeline_step, refuse_few_samples
from trainfit.models.recipe import StepOptions, in_parameter_dtype, training_step
from trainfit.steps.step import Loss, Step


def check_division(layout: Layout, dimensions: MeshDimensions, options: StepOptions) -> None:
    """Refuse a mesh that a step cannot be divided over, before anything is built."""
    if options.dtype == "fp16-autocast":
        raise OptionError(
            "--dtype fp16-autocast and --mesh: gradients that are scaled are not divided here; use "
            "bf16-autocast or bf16, or a function of your own."
        )
    if options.autocast_dtype and dimensions.size("pp") > 1 and dimensions.size("fsdp") == 1:
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
    pipe, tensor = dimensions.of(mesh, "pp"), dimensions.of(mesh, "tp")
    if pipe is not None:
        model = layout.stage(model, pipe.get_local_rank(), pipe.size(), options.seq or 0)
    if tensor is not None:
        layout.divide_layers(model, tensor)
    sharded = dimensions.size("fsdp") > 1
    if dimensions.names("replicate", "fsdp"):
        computes_in = options.autocast_dtype if sharded else None
        model = copies_share(model, layout.blocks(model), dimensions, mesh, computes_in)
    around = loss_parallel if layout.loss_in_parts and tensor is not None else nullcontext
    if pipe is not None:
        return pipeline_step(model, pipe, inputs, layout.handover(tensor, options), options, around)
    return training_step(model, inputs, options, loss, around=around, autocast=not sharded)
