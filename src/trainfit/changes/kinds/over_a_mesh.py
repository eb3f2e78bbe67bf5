"""The step on all devices of a mesh: its samples divided among copies of the model, or of its parts.

For models whose division is ours (built-in and `hf:`). The same samples as on one device are trained on, each
copy on its share; only averages of gradients are taken in another order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from trainfit.changes.change import NotPossible, StepChange
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.errors import OptionError
from trainfit.models.parallel.dimensions import MeshDimensions, Sizes
from trainfit.plans.ways import SAME_ARITHMETIC, ChangeMade
from trainfit.steps.step import Step
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace

_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")
_KNOWN = ("dp", "fsdp", "replicate", "tp")
_EXCLUDED = frozenset({"batch", "loss", "parameters", "state", "optimizer: 8-bit state"}) | {
    "optimizer: in backward",
    "optimizer: in backward, fused",
}
"""What works on whole parameters and gradients; and smaller batches, which a plan makes unnecessary first."""


def refuse_mesh(cluster: Cluster) -> None:
    """Raise `OptionError` for a mesh that `fit` does not look at."""
    MeshDimensions(cluster.mesh)
    other = next((name for name, _ in cluster.mesh if name not in _KNOWN), None)
    if other is not None or not cluster.mesh:
        raise OptionError(
            f"fit divides a step by {', '.join(_KNOWN)}; {other or 'a world size without a mesh'} is for "
            "estimate and plan."
        )


def changes(step: UnchangedStep) -> Iterator[StepChange]:
    """Yield the mesh that was given, all of it as FSDP2, and all of it as copies (DDP)."""
    cluster = step.cluster
    if cluster is None or not step.optimizers or step.passes != 1:
        return
    ranks = cluster.world_size
    meshes: list[Sizes] = [cluster.mesh, (("fsdp", ranks),), (("replicate", ranks),)]
    for mesh in dict.fromkeys(_as_fsdp(mesh) for mesh in meshes if math.prod(size for _, size in mesh) > 1):
        yield _over(step, replace(cluster, mesh=mesh))


def _as_fsdp(mesh: Sizes) -> Sizes:
    """Return a mesh without a dimension of one, and with `dp` by its other name."""
    return tuple(("fsdp" if name == "dp" else name, size) for name, size in mesh if size > 1)


def _over(step: UnchangedStep, cluster: Cluster) -> StepChange:
    dimensions = MeshDimensions(cluster.mesh)
    copies, batch = dimensions.size("fsdp") * dimensions.size("replicate"), step.settings.batch
    text = ",".join(f"{name}={size}" for name, size in cluster.mesh)
    made = ChangeMade("sharding", text, _code(step.trace, cluster, dimensions), SAME_ARITHMETIC)
    if batch is None or batch % copies:

        def refuse(step: Step) -> Step:
            said = "its samples" if batch is None else f"{batch} sample{'s' * (batch != 1)}"
            multiple = f": a multiple of {copies} can, as in --batch {copies}"
            raise NotPossible(f"{said} cannot be divided among {copies} copies{multiple}")

        return StepChange(made, make=refuse)
    return StepChange(
        made,
        options={"batch": batch // copies},
        excludes=_EXCLUDED,
        cluster=cluster,
        copies=copies,
    )


def _code(trace: Trace, cluster: Cluster, dimensions: MeshDimensions) -> str:
    """Return what the user writes: it takes as many processes, which `apply` does not start."""
    nodes = f"--nnodes {cluster.nodes} " if cluster.nodes > 1 else ""
    started = f"  # torchrun {nodes}--nproc-per-node {cluster.local_world_size} ..."
    calls: list[str] = []
    if dimensions.size("tp") > 1:
        calls.append(f"[parallelize_module(m, mesh['tp'], {{...}}) for m in {_blocks(trace)}]")
    if dimensions.size("fsdp") > 1:
        part = ", mesh=mesh" if len(cluster.mesh) > 1 else ""
        calls += [f"[fully_shard(m{part}) for m in {_blocks(trace)}]", f"fully_shard(model{part})"]
    elif dimensions.size("replicate") > 1 and calls:
        calls.append(f"[replicate(m, mesh=mesh['replicate']) for m in {_blocks(trace)}]")
    elif dimensions.size("replicate") > 1:
        calls.append("model = DistributedDataParallel(model)")
    return "; ".join(calls) + started


def _blocks(trace: Trace) -> str:
    """Return what a comprehension goes over: the model's repeated layers, of one class in a list."""
    found: dict[str, list[int]] = {}
    for number in trace.in_model:
        module = trace.modules[number]
        path, _, last = module.name.rpartition(".")
        if last.isdecimal() and module.class_name not in _CONTAINERS:
            found.setdefault(module.class_name, []).append(path.count("."))
    repeated = {name: depths for name, depths in found.items() if len(depths) > 1}
    if not repeated:
        return "model.children()"
    name = min(repeated, key=lambda name: (min(repeated[name]), -len(repeated[name]), name))
    return f"model.modules() if isinstance(m, {name})"
