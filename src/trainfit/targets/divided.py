"""Models of ours, built-in or `hf:`, as the step of one process or of one rank of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainfit.errors import OptionError
from trainfit.models.parallel.dimensions import MeshDimensions
from trainfit.models.parallel.layout import Layout
from trainfit.models.parallel.parallel_step import check_division, parallel_step
from trainfit.models.recipe import StepOptions, training_step
from trainfit.steps.step import Step
from trainfit.targets.cluster_mesh import device_mesh


@dataclass(frozen=True)
class Division:
    """How a model is divided over the ranks of a mesh, if at all."""

    layout: Layout
    options: StepOptions
    dimensions: MeshDimensions | None

    def step(self, model: nn.Module, inputs: Mapping[str, Any]) -> Step:
        """Return the training step of this rank around the model."""
        if self.dimensions is None:
            return training_step(model, inputs, self.options)
        mesh = device_mesh(self.options)
        return parallel_step(model, inputs, self.options, self.layout, self.dimensions, mesh)


def division_of(layout: Layout, options: StepOptions) -> Division:
    """Check that the model can be divided as the options say; nothing is built yet."""
    cluster = options.cluster
    if cluster is None:
        return Division(layout, options, None)
    if not cluster.mesh:
        size = cluster.world_size
        raise OptionError(
            f"--world-size {size} does not say how {size} processes share {layout.name}: add --mesh, as in "
            f"--mesh dp={size} (FSDP)"
            + (f" or --mesh dp={size // 2},tp=2 (with tensor parallelism)." if size % 2 == 0 else ".")
        )
    dimensions = MeshDimensions(cluster.mesh)
    check_division(layout, dimensions, options)
    return Division(layout, options, dimensions)
