"""How long a step with several changes may take, guessed from what each of them does alone.

A change makes the device or the host work more or less, in forward, in backward or in the optimizer's step.
What changes do to the same of these is multiplied: what makes products ten times as fast leaves a tenth of
what another change saves of them. It may be added up, where they save different work. The step takes at least
what the busier of the two needs: so what makes kernels shorter is not taken to help where the host is the
slower one, and two changes that only help together are taken to do so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainfit.changes.accumulation import CAPTURED_PASSES
from trainfit.changes.change import StepChange
from trainfit.costs.schedule import Schedule, schedule
from trainfit.costs.table import CostTable
from trainfit.traces.trace import COMPUTE, PHASES, Trace

_LEAST_OF_LIKELY = 0.9
"""What is saved by several changes is rarely so much apart that adding up is right where this is less."""


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


def parts_of_step(trace: Trace, costs: CostTable, changes: Sequence[StepChange]) -> StepParts:
    """Return the parts of a step that was captured with changes."""
    times = schedule(trace, costs)
    return StepParts.of(times, runs_of_ops(times, repeats_of(changes)))


def repeats_of(changes: Sequence[StepChange]) -> int:
    """Return how often forward and backward run in a step with changes."""
    return max((change.repeats for change in changes), default=1)


def runs_of_ops(times: Schedule, repeats: int) -> NDArray[np.float64]:
    """Return how often each op of a captured step runs in one in which forward and backward run so often."""
    runs = np.ones(len(times.trace.ops))
    if repeats > CAPTURED_PASSES:
        phases = [op.phase for op in times.trace.ops]
        first_backward = phases.index("backward")
        second = phases.index("forward", first_backward)
        end = len(phases) - phases[::-1].index("backward")
        runs[second:end] += repeats - CAPTURED_PASSES
    return runs


@dataclass(frozen=True)
class GuessedSeconds:
    """What a step with several changes takes most likely, and at least."""

    likely: float
    least: float


def guessed_seconds(base: StepParts, alone: Sequence[StepParts]) -> GuessedSeconds:
    """Return what a step with several changes may take, from what each alone makes of it."""
    if len(alone) < 2:
        seconds = (alone[0] if alone else base).step_seconds
        return GuessedSeconds(seconds, seconds)
    busy = np.maximum(base.busy, 1e-12)
    ratios = np.array([parts.busy / busy for parts in alone])
    multiplied = np.prod(ratios, axis=0)
    added = np.minimum(multiplied, np.maximum(1 + (ratios - 1).sum(axis=0), 0.0))
    likely, least = (float((busy * factors).sum(axis=1).max()) for factors in (multiplied, added))
    return GuessedSeconds(likely, max(least, _LEAST_OF_LIKELY * likely))
