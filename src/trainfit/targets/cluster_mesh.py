"""The mesh that `--mesh dp=8,tp=4` describes, as torch's `DeviceMesh`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainfit.models.recipe import StepOptions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def device_mesh(options: StepOptions) -> DeviceMesh:
    """Make the mesh, on the kind of device that the step is for; the last dimension fills a node first.

    It makes the process group too, if there is none yet.
    """
    assert options.cluster is not None and options.cluster.mesh, "asked for only where a mesh is given"
    from torch.distributed.device_mesh import init_device_mesh

    names, sizes = zip(*options.cluster.mesh)
    return init_device_mesh(options.device_type, sizes, mesh_dim_names=names)
