"""`FitResult`: what `fit` answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainfit.basics.in_notebooks import ShownInNotebooks
from trainfit.basics.units import format_bytes, format_seconds
from trainfit.devices.device_table import Device
from trainfit.plans.ways import Way
from trainfit.traces.trace import Trace


@dataclass(frozen=True)
class FitResult(ShownInNotebooks):
    """Ways that fit, the fastest first, none of them beaten by another."""

    target: str
    device: Device
    trace: Trace
    """Of the step as it is."""
    budget_bytes: int
    as_it_is: Way
    """Whether or not it fits."""
    fits: bool
    """Whether the step fits as it is."""
    ways: tuple[Way, ...]
    nearest: tuple[Way, ...] = ()
    """If nothing fits: what was looked at without a plan."""
    impossible: tuple[tuple[str, str], ...] = ()
    """Changes that cannot be made to this step, and why."""
    looked_at: int = 0
    """How many combinations were captured and judged."""
    complete: bool = True
    """Whether all that could have been better were looked at before time was up."""
    warnings: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of each stage."""

    def __repr__(self) -> str:
        """One line; the ways have the rest."""
        if not self.ways:
            return f"<FitResult of {self.target} on {self.device.name}: nothing fits>"
        best = self.ways[0]
        return (
            f"<FitResult of {self.target} on {self.device.name}: {len(self.ways)} ways, the fastest "
            f"{best.words}: {format_bytes(best.memory_bytes)}, {format_seconds(best.step_seconds)} per step>"
        )
