"""What planning answers: a plan with everything that a person wants to see beside it, and the frontier."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.named_options import DEFAULT_OPTIONS
from trainfit.basics.in_notebooks import ShownInNotebooks
from trainfit.basics.units import format_bytes
from trainfit.costs.advised_seconds import advised_seconds
from trainfit.costs.schedule import Schedule
from trainfit.costs.table import CostTable
from trainfit.devices.device_table import Device
from trainfit.memory.advice import Advice, advice
from trainfit.planning.baselines import Baseline
from trainfit.plans.plan import Plan
from trainfit.traces.simulate import Timeline
from trainfit.traces.trace import Trace


@dataclass(frozen=True)
class PlanResult(ShownInNotebooks):
    """A certified plan and what it is compared with. Bytes and seconds are predicted.

    If the budget cannot be met, `feasible` is false and the plan is the one with the smallest peak.
    """

    plan: Plan
    feasible: bool
    device: Device
    trace: Trace
    costs: CostTable
    timeline: Timeline
    """Of the step with the plan."""
    times: Schedule
    """The same step, op by op in time."""
    baselines: tuple[Baseline, ...]
    allocator: AllocatorOptions | None = DEFAULT_OPTIONS
    """How torch's caching allocator is set; None if memory is taken as it is asked for."""
    expandable: Plan | None = None
    """The plan for the same budget with `expandable_segments:True`, where that is clearly faster."""
    margin_bytes: int = 0
    """What the budget leaves free of the device's memory for what is not simulated; 0 if it was named."""
    warnings: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of each stage, at least `capture` and `total`."""

    @property
    def advice(self) -> tuple[Advice, ...]:
        """What would lower the peak of the smallest plan, the most first; nothing if the plan fits."""
        if self.feasible:
            return ()
        return advice(self.timeline, planned=True, seconds=advised_seconds(self.times))

    @property
    def expandable_added(self) -> float | None:
        """What that plan adds to the step, as a share of it."""
        if self.expandable is None:
            return None
        return self.expandable.added_seconds / max(self.expandable.baseline_step_seconds, 1e-12)

    def __repr__(self) -> str:
        """One line; the plan has its own."""
        return f"<PlanResult: {'fits' if self.feasible else 'does not fit'}, {self.plan!r}>"


@dataclass(frozen=True)
class FrontierPoint:
    """One plan that no other beats in both memory and time."""

    peak_bytes: int
    memory_bytes: int
    """The least memory with which it runs."""
    step_seconds: float
    plan: Plan


@dataclass(frozen=True)
class Frontier(ShownInNotebooks):
    """All such plans that were found, the one that needs the least memory first."""

    device: Device
    trace: Trace
    points: tuple[FrontierPoint, ...]
    baselines: tuple[Baseline, ...]
    seconds: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """One line; the points have the rest."""
        sizes = [format_bytes(point.memory_bytes) for point in self.points]
        between = f" from {sizes[0]} to {sizes[-1]}" if sizes else ""
        return f"<Frontier of {self.trace.target} on {self.device.name}: {len(sizes)} plans{between}>"
