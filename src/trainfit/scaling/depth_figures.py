"""Bytes and seconds of a step, and the same for a deeper model: layers that are alike add the same each.

A model of few layers is captured at two depths. Every figure of a deeper one lies on the line through both:
each further layer adds what it keeps, gathers and computes. Where phases of the step (forward and backward,
the optimizer's step) have peaks of their own, each has its line, and the peak is the larger one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from trainfit.costs.schedule import Schedule, with_device_seconds
from trainfit.sizing.rank_growth import group_dimensions
from trainfit.traces.simulate import Timeline
from trainfit.traces.trace import CATEGORIES, Trace


@dataclass(frozen=True)
class DepthFigures:
    """What a step needs. All of them lie on lines over the depth of the model."""

    pass_bytes: float
    """The most bytes at once in forward and backward."""
    optimizer_bytes: float
    """The same in the optimizer's step."""
    persistent_bytes: float
    """What is there before and after the step: parameters, optimizer state."""
    gradient_bytes: float
    """What gradients take that wait for the optimizer."""
    whole_parameter_bytes: float
    """The parameters of all ranks of the rank's shards together, as they are computed with."""
    pass_seconds: float
    optimizer_seconds: float
    exposed_fsdp: float
    exposed_replicate: float
    exposed_cp: float
    exposed_tp: float
    """By how much the step would be shorter without the collectives of a dimension."""
    waiting_seconds: float
    """How long the device waits for the host."""
    model_flops: float

    def at(self, other: DepthFigures, depths: tuple[int, int], depth: int) -> DepthFigures:
        """Return the figures of another depth; these are of the first of two, the others of the second."""
        far = (depth - depths[0]) / (depths[1] - depths[0])
        return DepthFigures(
            *(
                getattr(self, field.name) + far * (getattr(other, field.name) - getattr(self, field.name))
                for field in fields(DepthFigures)
            )
        )

    @property
    def peak_bytes(self) -> float:
        """The most bytes at once."""
        return max(self.pass_bytes, self.optimizer_bytes)

    @property
    def step_seconds(self) -> float:
        """The whole step, of one micro-batch."""
        return self.pass_seconds + self.optimizer_seconds

    @property
    def exposed_seconds(self) -> float:
        """By how much collectives make the step longer."""
        return self.exposed_fsdp + self.exposed_replicate + self.exposed_cp + self.exposed_tp


def figures_of(timeline: Timeline, times: Schedule, model_flops: float) -> DepthFigures:
    """Read the figures off a step that was replayed."""
    trace, phases = timeline.trace, times.phase_seconds
    ops = [op.phase == "optimizer" for op in trace.ops]
    in_optimizer = np.array(ops, dtype=np.bool_)
    used = timeline.used_bytes
    first = ops.index(True) if any(ops) else len(ops) - 1
    gradients = int(timeline.by_category[CATEGORIES.index("gradient"), first]) if ops else 0
    exposed = {name: _exposed(times, name) for name in ("fsdp", "replicate", "cp", "tp")}
    return DepthFigures(
        pass_bytes=float(used[~in_optimizer].max(initial=timeline.persistent_bytes)),
        optimizer_bytes=float(used[in_optimizer].max(initial=0)),
        persistent_bytes=float(timeline.persistent_bytes),
        gradient_bytes=float(gradients),
        whole_parameter_bytes=float(sum(module.whole_parameter_bytes for module in trace.modules)),
        pass_seconds=phases["forward"] + phases["backward"],
        optimizer_seconds=phases["optimizer"],
        exposed_fsdp=exposed["fsdp"],
        exposed_replicate=exposed["replicate"],
        exposed_cp=exposed["cp"],
        exposed_tp=exposed["tp"],
        waiting_seconds=times.waiting_share * times.step_seconds,
        model_flops=model_flops,
    )


def _exposed(times: Schedule, dimension: str) -> float:
    """Return by how much the step would be shorter if the collectives of a dimension took no time.

    Parameters that are divided among `fsdp` and `cp` together count as `fsdp`.
    """
    along = collectives_of(times.trace, dimension)
    if not along.any():
        return 0.0
    free = np.where(along, 0.0, times.device_seconds)
    return max(times.step_seconds - with_device_seconds(times, free).step_seconds, 0.0)


def collectives_of(trace: Trace, dimension: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which ops communicate along a dimension of the mesh."""
    mesh = () if trace.cluster is None else trace.cluster.mesh
    inside = [
        signature.collective is not None and group_dimensions(signature.collective, mesh)[:1] == (dimension,)
        for signature in trace.signatures
    ]
    return np.fromiter((inside[op.signature] for op in trace.ops), dtype=np.bool_, count=len(trace.ops))
