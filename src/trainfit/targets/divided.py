"""Models of ours, built-in or `hf:`, as the step of one process or of one rank of a mesh.

What divides them is loaded only for a mesh: torch takes seconds to load its own parts for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from trainfit.errors import OptionError
from trainfit.models.recipe import StepOptions, training_step
from trainfit.steps.step import Step
from trainfit.targets.cluster_mesh import device_mesh

if TYPE_CHECKING:
    from trainfit.models.parallel.layout import Layout

MakeStep = Callable[[nn.Module, Mapping[str, Any]], Step]


def step_maker(name: str, layout: Callable[[], Layout], options: StepOptions) -> MakeStep:
    """Return what makes the training step around a model and its inputs, on one rank if there is a mesh.

    Whether the model can be divided so is checked now; nothing is built yet.
    """
    cluster = options.cluster
    if cluster is None:
        return lambda model, inputs: training_step(model, inputs, options)
    from trainfit.models.parallel.dimensions import MeshDimensions
    from trainfit.models.parallel.parallel_step import check_division, parallel_step

    if not cluster.mesh:
        size = cluster.world_size
        raise OptionError(
            f"--world-size {size} does not say how {size} processes share {name}: add --mesh, as in "
            f"--mesh dp={size} (FSDP)"
            + (f" or --mesh dp={size // 2},tp=2 (with tensor parallelism)." if size % 2 == 0 else ".")
        )
    dimensions, divided = MeshDimensions(cluster.mesh), layout()
    check_division(divided, dimensions, options)
    return lambda model, inputs: parallel_step(
        model, inputs, options, divided, dimensions, device_mesh(options)
    )
