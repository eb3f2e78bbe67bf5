"""One combination of changes: its step captured, and planned if it does not fit otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.device_memory import StepMemory
from trainfit.changes.accumulation import CAPTURED_PASSES
from trainfit.changes.change import StepChange
from trainfit.changes.kinds.allocator_segments import EXPANDABLE
from trainfit.costs.schedule import Schedule, schedule
from trainfit.costs.table import CostTable
from trainfit.devices.device_table import Device
from trainfit.planning.certify import promised_peak
from trainfit.planning.host_copies import HostLink
from trainfit.planning.planner import Planner
from trainfit.plans.plan import Plan
from trainfit.plans.ways import Way
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

Capture = Callable[[Sequence[StepChange]], tuple[Trace, CostTable] | None]
"""Captures and prices the step with changes; None if they cannot be made."""


@dataclass
class Candidates:
    """Judges combinations of changes for one device and budget; nothing is captured twice."""

    capture: Capture
    budget_bytes: int
    allocator: AllocatorOptions | None
    budget_for: Callable[[Device], int] | None = None
    """The budget on a device of which something else takes a part, as NCCL does."""
    _traces: dict[tuple[str, ...], tuple[Trace, CostTable] | None] = field(default_factory=dict)

    def know(self, changes: Sequence[StepChange], trace: Trace, costs: CostTable) -> None:
        """Remember what was captured elsewhere."""
        self._traces[_key(changes)] = (trace, costs)

    def unplanned(self, changes: Sequence[StepChange]) -> Way | None:
        """Return the step with changes and without a plan; None if they cannot be made."""
        found = self._captured(changes)
        if found is None:
            return None
        trace, costs = found
        timeline = simulate(trace)
        memory = StepMemory(timeline, costs.device, self._allocator(changes))
        reserve = promised_peak(trace, timeline, has_regions=False) - timeline.peak_bytes
        needed = memory.smallest_bytes + reserve + self._taken(costs)
        peak = timeline.peak_bytes + reserve
        return _way(changes, schedule(trace, costs), peak, needed)

    def planned(self, changes: Sequence[StepChange], seconds_limit: float) -> Way | None:
        """Return the step with changes and the fastest plan that fits; None if none does."""
        found = self._captured(changes)
        if found is None:
            return None
        trace, costs = found
        # A CPU computes in the host's memory: there is nowhere else to copy to.
        link = HostLink.of(costs.device) if costs.device.pcie_bytes_per_second else None
        planner = Planner(trace, costs, self._allocator(changes), link)
        taken = self._taken(costs)
        certified = planner.plan(self.budget_bytes - taken, seconds_limit=seconds_limit)
        if not certified.fits:
            return None
        plan = certified.promised()
        kept = plan if plan.regions else None
        return _way(changes, certified.times, plan.peak_bytes, plan.memory_bytes + taken, kept)

    def _taken(self, costs: CostTable) -> int:
        """Return what communication takes of the memory that the budget is of."""
        return 0 if self.budget_for is None else max(self.budget_bytes - self.budget_for(costs.device), 0)

    def fits(self, way: Way) -> bool:
        """Whether it runs within the budget."""
        return way.memory_bytes <= self.budget_bytes

    def _captured(self, changes: Sequence[StepChange]) -> tuple[Trace, CostTable] | None:
        # The allocator's setting changes nothing about the step itself.
        own = [change for change in changes if change.made.value != EXPANDABLE]
        key = _key(own)
        if key not in self._traces:
            self._traces[key] = self.capture(own)
        return self._traces[key]

    def _allocator(self, changes: Sequence[StepChange]) -> AllocatorOptions | None:
        expandable = any(change.made.value == EXPANDABLE for change in changes)
        if self.allocator is None or not expandable:
            return self.allocator
        return replace(self.allocator, expandable_segments=True)


def _key(changes: Sequence[StepChange]) -> tuple[str, ...]:
    return tuple(sorted(change.name for change in changes))


def _way(
    changes: Sequence[StepChange],
    times: Schedule,
    peak_bytes: int,
    memory_bytes: int,
    plan: Plan | None = None,
) -> Way:
    return Way(
        target=times.trace.target,
        device=times.costs.device.name,
        changes=tuple(change.made for change in changes),
        plan=plan,
        peak_bytes=peak_bytes,
        memory_bytes=memory_bytes,
        step_seconds=_whole_step(times, _repeats(changes)),
        samples=_times(times.trace.samples, changes),
        tokens=_times(times.trace.tokens, changes),
    )


def _repeats(changes: Sequence[StepChange]) -> int:
    return max((change.repeats for change in changes), default=1)


def _times(count: int | None, changes: Sequence[StepChange]) -> int | None:
    """Return the samples or tokens of the whole step, of which two passes, or one copy, were captured."""
    repeats, copies = _repeats(changes), max((change.copies for change in changes), default=1)
    if count is None:
        return None
    return count * copies if repeats == 1 else count * copies * repeats // CAPTURED_PASSES


def _whole_step(times: Schedule, repeats: int) -> float:
    """Return the time of a step in which forward and backward run so often."""
    if repeats <= CAPTURED_PASSES:
        return times.step_seconds
    phases = [op.phase for op in times.trace.ops]
    first_backward = phases.index("backward")
    second = phases.index("forward", first_backward)
    end = len(phases) - phases[::-1].index("backward")
    return times.step_seconds + (repeats - CAPTURED_PASSES) * float(times.op_seconds[second:end].sum())
