"""What a reader sees of one step on several devices: its fields are the keys of its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trainfit.devices.device_table import Verdict

PlanNeeded = Literal["not needed", "needed", "none fits", "not looked for"]


@dataclass(frozen=True)
class DeviceRow:
    """The step on one device. Times and costs are those with the plan, where one is needed."""

    name: str
    usable_bytes: int
    """What the device has for tensors."""
    verdict: Verdict
    """Of the step as it is."""
    fits: bool
    peak_bytes: int
    smallest_memory_bytes: int
    spare_bytes: int
    plan: PlanNeeded
    runs: bool
    """Whether it fits, as it is or with the plan."""
    plan_memory_bytes: int | None
    """The least memory with which the step runs under the plan; if none fits, under the smallest."""
    plan_regions: int | None
    plan_added_seconds: float | None
    plan_added_share: float | None
    """What the plan adds to the step, in seconds and as a share of the step as it is."""
    step_seconds: float | None
    """None if it does not run, or if nothing is known about the device's speed."""
    lower_seconds: float | None
    upper_seconds: float | None
    """Four of five steps are expected between the two."""
    launch_bound: bool
    """Whether the device waits for the host to issue kernels: then the host decides about the time."""
    tokens_per_second: float | None
    samples_per_second: float | None
    """Of all copies of the model together."""
    run_seconds: float | None
    run_lower_seconds: float | None
    run_upper_seconds: float | None
    """Of the whole run, if its length was given."""
    price_per_hour: float | None
    """Of one device, as the user gave it."""
    cost: float | None
    cost_lower: float | None
    cost_upper: float | None
    """Of the whole run on all devices of the cluster."""
    cost_per_million_tokens: float | None
    cost_per_million_samples: float | None
    cost_per_epoch: float | None


@dataclass(frozen=True)
class RunData:
    """How long a run is."""

    tokens: int | None
    samples: int | None
    """Of one epoch."""
    epochs: float | None
    steps: int
    words: str


@dataclass(frozen=True)
class ComparisonData:
    """One step on several devices: where it fits, how long it takes, what it costs."""

    target: str
    torch: str
    seconds: dict[str, float]
    """Wall time of each stage."""
    ops: int
    settings: dict[str, Any]
    warnings: tuple[str, ...]
    captures: int
    """How often the step was captured: once for devices on which it does the same."""
    world_size: int
    mesh: dict[str, int]
    copies: int
    """How many copies of the model train at once, each on data of its own."""
    run: RunData | None
    devices: tuple[DeviceRow, ...]
    cheapest: str | None
    """The device on which the run costs least, of those on which it runs and whose price is known."""
    fastest: str | None
    description: str
    """The settings in one line."""

    @property
    def without_price(self) -> tuple[str, ...]:
        """Where it runs, and nobody has said what that costs, although prices of others are known."""
        if self.cheapest is None:
            return ()
        return tuple(row.name for row in self.devices if row.runs and row.price_per_hour is None)

    def row(self, name: str | None) -> DeviceRow | None:
        """Return the row of a device."""
        return next((row for row in self.devices if row.name == name), None)
