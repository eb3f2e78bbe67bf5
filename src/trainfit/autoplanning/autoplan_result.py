"""`AutoPlan`: what was found about a step that is about to run, and what was done."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainfit.basics.units import format_bytes, format_seconds
from trainfit.devices.device_table import Device
from trainfit.plans.plan import Plan
from trainfit.traces.trace import Trace


@dataclass(frozen=True)
class AutoPlan:
    """What the step needs, what there is, and the plan that was applied. Bytes and seconds are predicted."""

    fits: bool
    """Whether the step fits as it is: then there is no plan, and nothing was done."""
    plan: Plan | None
    device: Device
    budget_bytes: int
    """What the step may use."""
    needed_bytes: int
    """What it needs without a plan."""
    trace: Trace = field(repr=False)
    seconds: float = 0.0
    """How long it took to find this out."""
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What was done, in one line."""
        there = f"{format_bytes(self.budget_bytes)} for it on {self.device.name}"
        took = f"(predicted in {format_seconds(self.seconds)})"
        if self.plan is None:
            needed = format_bytes(self.needed_bytes)
            return (
                f"trainfit: fits without a plan: nothing done. The step needs {needed}, with {there} {took}"
            )
        added = self.plan.added_seconds / max(self.plan.baseline_step_seconds, 1e-12)
        count = len(self.plan.regions)
        return (
            f"trainfit: plan applied: {count} region{'s' if count != 1 else ''}, "
            f"{format_bytes(self.plan.memory_bytes)} instead of {format_bytes(self.needed_bytes)}, with "
            f"{there}; +{added:.1%} time per step {took}"
        )

    def __repr__(self) -> str:
        """One line."""
        return f"<AutoPlan: {self.text}>"
