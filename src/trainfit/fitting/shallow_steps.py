"""What steps of a deep model take, worked out from captures of the same model with few layers.

Layers that are alike add the same each, so that the figures of a deep model lie on the line through those of
two shallow ones, whose captures take a fraction of the time. They only tell which steps are worth being
captured whole. Whether a model is of that sort is seen in the step as it is, which is captured both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainfit.changes.change import StepChange
from trainfit.costs.table import CostTable
from trainfit.fitting.guessed_times import StepParts, parts_of_step
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import PHASES, Trace

_DEPTHS = (2, 3)
_LEAST_LAYERS = 8
"""A model with fewer is as quickly captured whole."""
_NOT_PLANNED = ("parameter", "buffer", "gradient", "optimizer_state")
_OFF_THE_LINE = 2e-3
"""A share of the step's time."""

ShallowCapture = Callable[[Sequence[StepChange], int], tuple[Trace, CostTable] | None]
"""Captures and prices the step of a model with so many layers; None if that cannot be."""


@dataclass(frozen=True)
class Outlook:
    """What a step needs without a plan, captured or worked out."""

    peak_bytes: float
    """The most bytes at once."""
    memory_bytes: float
    """The least memory with which it runs; of what is worked out, with what the allocator adds as it is."""
    parts: StepParts
    least_bytes: float = 0.0
    """What no plan changes of it."""

    @property
    def step_seconds(self) -> float:
        """How long it takes."""
        return self.parts.step_seconds


@dataclass(frozen=True)
class _Figures:
    """What lies on lines over the number of layers."""

    ops: int
    peaks: NDArray[np.float64]
    """The most bytes at once, in each phase."""
    least: int
    """The bytes that no plan changes."""
    parts: StepParts
    forward: tuple[str, ...]

    @classmethod
    def of(cls, trace: Trace, costs: CostTable, changes: Sequence[StepChange]) -> _Figures:
        used = simulate(trace).used_bytes
        phases = np.array([PHASES.index(op.phase) for op in trace.ops], dtype=np.int64)
        peaks = [float(used[phases == number].max(initial=0)) for number in range(len(PHASES))]
        parts = parts_of_step(trace, costs, changes)
        return cls(len(trace.ops), np.array(peaks), least_planned_bytes(trace), parts, forward_ops(trace))


@dataclass
class ShallowSteps:
    """Works out the steps of one deep model."""

    capture: ShallowCapture
    layers: int
    base: Outlook
    """The step as it is, captured whole."""
    _base_peak: float = 0.0
    _forwards: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, capture: ShallowCapture, layers: int, whole: Trace, base: Outlook) -> ShallowSteps | None:
        """Return what works out steps; None where the layers are few, or not alike."""
        if layers < _LEAST_LAYERS:
            return None
        made = cls(capture, layers, base)
        pair = made._captured(())
        if pair is None:
            return None
        deep = made._deep(*pair)
        off = abs(deep.parts.step_seconds / base.step_seconds - 1)
        if deep.ops != len(whole.ops) or off > _OFF_THE_LINE:
            return None
        made._base_peak = float(deep.peaks.max())
        return made

    def outlook(self, changes: Sequence[StepChange]) -> Outlook | None:
        """Return what a step with changes needs; None if a model with few layers cannot tell."""
        pair = self._captured(changes)
        if pair is None:
            return None
        deep = self._deep(*pair)
        more = float(deep.peaks.max()) - self._base_peak
        return Outlook(self.base.peak_bytes + more, self.base.memory_bytes + more, deep.parts, deep.least)

    def has_same_forward(self, changes: Sequence[StepChange]) -> bool:
        """Whether forward does the same as in the step as it is, of a step that was asked about."""
        return self._forwards.get(_names(changes)) == self._forwards[()]

    def _captured(self, changes: Sequence[StepChange]) -> tuple[_Figures, _Figures] | None:
        found: list[_Figures] = []
        for depth in _DEPTHS:
            one = self.capture(changes, depth)
            if one is None:
                return None
            found.append(_Figures.of(*one, changes))
        self._forwards[_names(changes)] = tuple(one.forward for one in found)
        return found[0], found[1]

    def _deep(self, one: _Figures, other: _Figures) -> _Figures:
        """Return the figures of the whole model, with the forward of the shallower one."""
        far = (self.layers - _DEPTHS[0]) / (_DEPTHS[1] - _DEPTHS[0])
        busy = one.parts.busy + far * (other.parts.busy - one.parts.busy)
        seconds = one.parts.step_seconds + far * (other.parts.step_seconds - one.parts.step_seconds)
        peaks = one.peaks + far * (other.peaks - one.peaks)
        ops, least = (a + far * (b - a) for a, b in ((one.ops, other.ops), (one.least, other.least)))
        return _Figures(round(ops), peaks, round(least), StepParts(seconds, busy), one.forward)


def forward_ops(trace: Trace) -> tuple[str, ...]:
    """Return the names of the operators of forward."""
    return tuple(trace.op_name(number) for number, op in enumerate(trace.ops) if op.phase == "forward")


def least_planned_bytes(trace: Trace) -> int:
    """Return what no plan changes: parameters, gradients and the optimizer's state when its step begins."""
    begins = next((n for n, op in enumerate(trace.ops) if op.phase == "optimizer"), len(trace.ops))
    return sum(
        trace.occupied_at(number, begins)
        for number, storage in enumerate(trace.storages)
        if storage.category in _NOT_PLANNED and storage.alive_at(begins)
    )


def _names(changes: Sequence[StepChange]) -> tuple[str, ...]:
    return tuple(sorted(change.name for change in changes))
