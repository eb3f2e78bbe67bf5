"""Ways to divide a module among tensor-parallel ranks that torch has no class for."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from trainfit.models.parallel.local_parts import compute_with_local_parts

# torch has no types for what it hands to these.
# mypy: disable-error-code="no-untyped-call"


class Copied(ParallelStyle):
    """Every rank has the module's own parameters whole, and computes the same with them.

    `method` is what computes with them. With `partial_gradients`, each rank has its own part of the input,
    and gradients are summed.
    """

    def __init__(self, method: str = "forward", *, partial_gradients: bool = False) -> None:
        super().__init__()
        self.method, self.partial_gradients = method, partial_gradients

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        distribute_own(module, mesh, Replicate())
        compute_with_local_parts(module, self.method, partial_gradients=self.partial_gradients)
        return module


class FusedColwise(ColwiseParallel):
    """A projection to several outputs in one: each rank gets its columns of every one of them.

    The rows of the weight are put into another order first, so that a rank's consecutive part holds its heads
    of the queries, of the keys and of the values (as in Shoeybi et al. 2019, Megatron-LM).
    """

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                by_rank = parameter.unflatten(0, (self.outputs, mesh.size(), -1)).transpose(0, 1)
                parameter.copy_(by_rank.flatten(0, 2))
        return super()._apply(module, mesh)


class DividedExperts(ParallelStyle):
    """A mixture of experts of which each rank has a part of every expert, and the router whole.

    The input is divided along the sequence and gathered; each rank's experts return a part of the sum, which
    is added up and divided again.
    """

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        distribute_own(module.get_submodule("router"), mesh, Replicate())
        compute_with_local_parts(module.get_submodule("router"), partial_gradients=True)
        for expert in module.get_submodule("experts").children():
            for name, linear in expert.named_children():
                distribute_own(linear, mesh, Shard(1) if name == "down" else Shard(0))
                compute_with_local_parts(linear)
        module.register_forward_pre_hook(partial(_gathered, mesh))
        module.register_forward_hook(partial(_added_up, mesh))
        return module


def _gathered(mesh: DeviceMesh, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[torch.Tensor]:
    (hidden,) = inputs
    if not isinstance(hidden, DTensor):
        hidden = DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False)
    whole = hidden.redistribute(mesh, [Replicate()])
    return (whole.to_local(grad_placements=[Partial()]),)


def _added_up(mesh: DeviceMesh, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    parts = DTensor.from_local(output, mesh, [Partial()], run_check=False)
    return parts.redistribute(mesh, [Shard(1)]).to_local()


def distribute_own(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Make DTensors of the parameters that are the module's own; those that are DTensors stay."""
    for name, parameter in module.named_parameters(recurse=False):
        if not isinstance(parameter, DTensor):
            divided = distribute_tensor(parameter.detach(), mesh, [placement])
            module.register_parameter(name, nn.Parameter(divided, parameter.requires_grad))
