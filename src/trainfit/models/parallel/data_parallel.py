"""Copies of a model that train on different data: FSDP2 and HSDP, or DDP where nothing is divided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainfit.models.parallel.dimensions import MeshDimensions
from trainfit.models.parallel.exchanged_experts import own_experts
from trainfit.models.parallel.unit_grain import units_among


def copies_share(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    dimensions: MeshDimensions,
    mesh: DeviceMesh,
    computes_in: torch.dtype | None,
) -> nn.Module:
    """Return the model whose copies share their gradients, and with `fsdp` their parameters too.

    FSDP2 gathers each block as a unit (`unit_grain.py` has others), and what is in none with the root. In a
    pipeline the parameters stay gathered between the micro-batches. `computes_in` is what FSDP2 casts
    parameters to where it gathers them; gradients are then reduced in float32.
    """
    policy = MixedPrecisionPolicy(param_dtype=computes_in, reduce_dtype=torch.float32)
    if computes_in is None:
        policy = MixedPrecisionPolicy()
    in_pipeline = dimensions.size("pp") > 1
    sharing = dimensions.copies(mesh)
    assert sharing is not None, "nothing is shared without one of the two"
    if dimensions.sharded:
        experts = own_experts(model)
        if experts:
            _share_experts(experts, dimensions, mesh, policy, sharing.size())
        for unit in units_among(blocks):
            fully_shard(unit, mesh=sharing, mp_policy=policy, reshard_after_forward=not in_pipeline)
        fully_shard(
            model, mesh=sharing, mp_policy=policy, reshard_after_forward=False if in_pipeline else None
        )
        return model
    if dimensions.size("tp") == 1 and not in_pipeline:
        return DistributedDataParallel(model, process_group=sharing.get_group())
    # DDP knows neither DTensors nor that a pipeline runs backward several times in a step.
    for block in blocks:
        replicate(block, mesh=sharing, mp_policy=policy)
    replicate(model, mesh=sharing, mp_policy=policy)
    return model


def _share_experts(
    experts: Sequence[nn.Module],
    dimensions: MeshDimensions,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    copies: int,
) -> None:
    """Let the ranks that have the same experts share them.

    An expert computes with the tokens of all ranks that send it some: its gradient is a sum over them, and
    becomes the mean over all copies of the model as every other.
    """
    sharing = dimensions.copies_of_experts(mesh)
    for unit in experts:
        fully_shard(unit, mesh=sharing, mp_policy=policy, reshard_after_forward=dimensions.size("pp") == 1)
        shared = cast(FSDPModule, unit)
        shared.set_gradient_divide_factor(copies)
        # gloo has sums only; and of a mesh of one torch divides the gradients itself.
        if mesh.device_type == "cpu" and sharing.size(-1) > 1:
            shared.set_force_sum_reduction_for_comms(True)
