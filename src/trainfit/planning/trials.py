"""Whether a choice of regions runs in so much memory: asked of the allocator for many choices, quickly.

An answer takes a hundredth of a second where a certificate takes ten times as long. It is that of the first
few steps; the certificate of the plan that is given in the end replays as many as it takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.caching_allocator import new_state
from trainfit.allocator.device_memory import StepMemory, least_capacity
from trainfit.allocator.sequence_replay import run_to_end
from trainfit.allocator.step_columns import StepColumns
from trainfit.planning.certify import Unplanned, reserve_of
from trainfit.planning.effects import Effect
from trainfit.planning.planned_columns import PlannedColumns
from trainfit.planning.rewrite import rewritten
from trainfit.traces.simulate import simulate

_STEPS = 3
"""As many as it takes to see the first one, a later one, and one that finds what the later one left."""


@dataclass
class Trials:
    """Replays of one step with different regions; counted, because each takes a while."""

    step: Unplanned
    allocator: AllocatorOptions | None
    """None: memory is taken as it is asked for."""
    columns: PlannedColumns
    count: int = 0
    _answers: dict[tuple[tuple[int, ...], int], bool] = field(default_factory=dict)

    def run(self, effects: Sequence[Effect], budget_bytes: int) -> bool:
        """Whether the step with these regions runs within a budget."""
        # Effects are kept as long as the planner, so that their identities stay what they are.
        key = (tuple(id(effect) for effect in effects), budget_bytes)
        if key not in self._answers:
            self._answers[key] = self._replayed(effects, budget_bytes)
        return self._answers[key]

    def least_peak_bytes(self, effects: Sequence[Effect]) -> int:
        """Return what the step with these regions asks for at once, without workspaces."""
        columns = self.columns.of(effects)
        if columns is None:
            return simulate(rewritten(self.step.trace, effects)).peak_bytes
        return columns.least_peak_bytes

    def needed_bytes(self, effects: Sequence[Effect]) -> int:
        """Return the least budget within which the step with these regions runs."""
        trace, device = self.step.trace, self.step.costs.device
        columns = self._columns(effects)
        if columns is None:
            timeline = simulate(rewritten(trace, effects))
            needed = StepMemory(timeline, device, self.allocator).smallest_bytes
            return needed + reserve_of(trace, timeline.peak_bytes)
        needed = least_capacity(columns.sequence(_STEPS), self.allocator, device)
        return needed + reserve_of(trace, columns.least_peak_bytes)

    def _replayed(self, effects: Sequence[Effect], budget_bytes: int) -> bool:
        trace, device = self.step.trace, self.step.costs.device
        columns = self._columns(effects)
        if columns is None:
            self.count += 1
            timeline = simulate(rewritten(trace, effects))
            capacity = budget_bytes - reserve_of(trace, timeline.peak_bytes)
            return StepMemory(timeline, device, self.allocator).runs_within(capacity)
        peak_bytes = columns.least_peak_bytes
        capacity = budget_bytes - reserve_of(trace, peak_bytes)
        if peak_bytes > capacity:
            return False
        self.count += 1
        assert self.allocator is not None
        state = new_state(capacity, self.allocator, max(device.memory_bytes, capacity))
        return run_to_end(state, columns.sequence(_STEPS)) is None

    def _columns(self, effects: Sequence[Effect]) -> StepColumns | None:
        """Return the columns of the step with these regions, if an allocator is to be asked about them."""
        if self.allocator is None or self.step.trace.device != "cuda":
            return None
        return self.columns.of(effects)
