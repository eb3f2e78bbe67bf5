"""`AutoPlan`: what was found about a step that is about to run, and what was done."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainfit.basics.units import format_bytes, format_seconds
from trainfit.devices.device_table import Device
from trainfit.plans.plan import Plan
from trainfit.traces.trace import Trace


@dataclass(frozen=True)
class RankNeed:
    """What one of the processes that train together needs. Bytes are predicted."""

    rank: int
    needed_bytes: int
    """Without a plan."""
    budget_bytes: int
    """What it may use."""
    fits: bool
    """Whether it fits: with the plan if there is one."""
    planned_bytes: int = 0
    """With the plan; 0 if there is none."""

    @property
    def lacking_bytes(self) -> int:
        """What it has too little, or, below zero, what it has left."""
        return (self.planned_bytes or self.needed_bytes) - self.budget_bytes


@dataclass(frozen=True)
class AutoPlan:
    """What the step needs, what there is, and the plan that was applied. Bytes and seconds are predicted.

    Where several processes train together, figures are those of this process; `ranks` has those of all.
    """

    fits: bool
    """Whether the step fits as it is, on all ranks: then there is no plan, and nothing was done."""
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
    ranks: tuple[RankNeed, ...] = ()
    """What each process needs, by rank; of one that trains alone, its own."""

    @property
    def fullest(self) -> RankNeed:
        """The process that has least left."""
        planned = 0 if self.plan is None else self.plan.memory_bytes
        alone = RankNeed(0, self.needed_bytes, self.budget_bytes, True, planned)
        return max(self.ranks, key=lambda one: (one.lacking_bytes, -one.rank), default=alone)

    @property
    def text(self) -> str:
        """What was done, in one line; of several ranks the figures are those of the fullest."""
        one, count = self.fullest, len(self.ranks)
        there = f"{format_bytes(one.budget_bytes)} for it on {self.device.name}"
        took = f"(predicted in {format_seconds(self.seconds)})"
        needed = format_bytes(one.needed_bytes)
        if self.plan is None:
            where = f" on all {count} ranks" if count > 1 else ""
            which = f" of rank {one.rank}" if count > 1 else ""
            return (
                f"trainfit: fits without a plan{where}: nothing done. The step{which} needs {needed}, with "
                f"{there} {took}"
            )
        added = self.plan.added_seconds / max(self.plan.baseline_step_seconds, 1e-12)
        regions = len(self.plan.regions)
        where = f" on {count} ranks" if count > 1 else ""
        which = f"on rank {one.rank} " if count > 1 else ""
        return (
            f"trainfit: plan applied{where}: {regions} region{'s' if regions != 1 else ''}, "
            f"{which}{format_bytes(one.planned_bytes)} instead of {needed}, with "
            f"{there}; +{added:.1%} time per step {took}"
        )

    def __repr__(self) -> str:
        """One line."""
        return f"<AutoPlan: {self.text}>"
