"""Bytes and seconds of a step, and the same for a deeper model: layers that are alike add the same each.

A model of few layers is captured at two depths. Every figure of a deeper one lies on the line through both:
each further layer adds what it keeps, gathers and computes. Where phases of the step (forward and backward,
the optimizer's step) have peaks of their own, each has its line, and the peak is the larger one.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np

from trainfit.costs.schedule import Schedule, with_device_seconds
from trainfit.scaling.mesh_candidates import EXCHANGING
from trainfit.scaling.stage_measures import StageMeasures, collectives_along, stage_measures
from trainfit.traces.simulate import Timeline
from trainfit.traces.trace import CATEGORIES


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
    exposed_ep: float
    exposed_tp: float
    """By how much the step would be shorter without the collectives of a dimension."""
    waiting_seconds: float
    """How long the device waits for the host."""
    model_flops: float
    stage: StageMeasures
    """What stages of a pipeline would have of it."""

    def at(self, other: DepthFigures, depths: tuple[int, int], depth: int) -> DepthFigures:
        """Return the figures of another depth; these are of the first of two, the others of the second."""
        far = (depth - depths[0]) / (depths[1] - depths[0])
        return _combined(self, other, 1 - far, far)

    def less(self, other: DepthFigures) -> DepthFigures:
        """Return by how much these are larger than others."""
        return _combined(self, other, 1.0, -1.0)

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
        return sum(self.exposed.values())

    @property
    def exposed(self) -> dict[str, float]:
        """The same by dimension."""
        return {name: float(getattr(self, f"exposed_{name}")) for name in EXCHANGING}


def figures_of(timeline: Timeline, times: Schedule, model_flops: float) -> DepthFigures:
    """Read the figures off a step that was replayed."""
    trace, phases = timeline.trace, times.phase_seconds
    ops = [op.phase == "optimizer" for op in trace.ops]
    in_optimizer = np.array(ops, dtype=np.bool_)
    used = timeline.used_bytes
    first = ops.index(True) if any(ops) else len(ops) - 1
    gradients = int(timeline.by_category[CATEGORIES.index("gradient"), first]) if ops else 0
    exposed = {f"exposed_{name}": _exposed(times, name) for name in EXCHANGING}
    return DepthFigures(
        pass_bytes=float(used[~in_optimizer].max(initial=timeline.persistent_bytes)),
        optimizer_bytes=float(used[in_optimizer].max(initial=0)),
        persistent_bytes=float(timeline.persistent_bytes),
        gradient_bytes=float(gradients),
        whole_parameter_bytes=float(sum(module.whole_parameter_bytes for module in trace.modules)),
        pass_seconds=phases["forward"] + phases["backward"],
        optimizer_seconds=phases["optimizer"],
        **exposed,
        waiting_seconds=times.waiting_share * times.step_seconds,
        model_flops=model_flops,
        stage=stage_measures(timeline, times),
    )


Figures = TypeVar("Figures", DepthFigures, StageMeasures)


def _combined(one: Figures, other: Figures, share: float, of_other: float) -> Figures:
    """Return figures that are each so many times one and so many times the other."""
    found = {}
    for field in fields(one):
        first, second = getattr(one, field.name), getattr(other, field.name)
        if isinstance(first, StageMeasures):
            found[field.name] = _combined(first, second, share, of_other)
        else:
            found[field.name] = share * first + of_other * second
    return type(one)(**found)


def _exposed(times: Schedule, dimension: str) -> float:
    """Return by how much the step would be shorter if the collectives of a dimension took no time.

    Parameters that are divided among `fsdp` and `cp` or `ep` together count as `fsdp`.
    """
    along = collectives_along(times.trace, (dimension,))
    if not along.any():
        return 0.0
    free = np.where(along, 0.0, times.device_seconds)
    return max(times.step_seconds - with_device_seconds(times, free).step_seconds, 0.0)
