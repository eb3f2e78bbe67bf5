"""How long a step with several changes may take, guessed from what each of them does alone.

A change makes the device or the host work more or less, in forward, in backward or in the optimizer's step.
What changes do to the same of these is added up or multiplied, whichever is less. The step takes at least
what the busier of the two needs: so what makes kernels shorter is not taken to help where the host is the
slower one, and two changes that only help together are taken to do so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainfit.costs.schedule import Schedule
from trainfit.traces.trace import COMPUTE, PHASES


@dataclass(frozen=True)
class StepParts:
    """What a step without a plan takes, and what device and host do for it, phase by phase."""

    step_seconds: float
    busy: NDArray[np.float64]
    """Seconds: a row for the device and one for the host, a column for each phase."""

    @classmethod
    def of(cls, times: Schedule, weights: NDArray[np.float64]) -> StepParts:
        """Return the parts of a step, in which each op runs so often."""
        phases = np.array([PHASES.index(op.phase) for op in times.trace.ops], dtype=np.int64)
        computes = np.array([op.queue == COMPUTE for op in times.trace.ops], dtype=np.float64)
        rows = (times.device_seconds * computes, times.occupied_seconds)
        busy = np.array([np.bincount(phases, row * weights, len(PHASES)) for row in rows])
        return cls(float((times.op_seconds * weights).sum()), busy)


def guessed_seconds(base: StepParts, alone: Sequence[StepParts]) -> float:
    """Return the least that a step with several changes may take, from what each alone makes of it."""
    if len(alone) < 2:
        return (alone[0] if alone else base).step_seconds
    least = np.maximum(base.busy, 1e-12)
    ratios = np.array([parts.busy / least for parts in alone])
    factors = np.minimum(np.prod(ratios, axis=0), np.maximum(1 + (ratios - 1).sum(axis=0), 0.0))
    return float((least * factors).sum(axis=1).max())
