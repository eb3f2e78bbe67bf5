"""What the search for the largest size answers: the size, what it needs, and throughput over sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainfit.basics.units import format_bytes, format_count
from trainfit.costs.estimates import Estimate
from trainfit.devices.device_table import Device
from trainfit.planning.plan_results import PlanResult
from trainfit.traces.simulate import Timeline

SizeName = Literal["batch", "seq"]
Limit = Literal["memory", "model", "refused", "range"]


@dataclass(frozen=True)
class SizeRow:
    """One size, predicted."""

    size: int
    fits: bool
    captured: bool
    """Whether the step was captured with this size; otherwise it is worked out from captures of others."""
    peak_bytes: int
    smallest_memory_bytes: int
    """The least memory with which it runs; with a plan, of the step that runs the plan."""
    step_seconds: float | None
    """None where nothing is known about the device's speed."""
    samples_per_second: float | None
    tokens_per_second: float | None
    plan_adds: float | None = None
    """What the plan adds to the step's time, as a share of the step as it is; None without plans."""

    @property
    def rate(self) -> float | None:
        """What sizes are compared by: tokens per second, or samples where the step has no tokens."""
        return self.samples_per_second if self.tokens_per_second is None else self.tokens_per_second


@dataclass(frozen=True)
class MaxSize:
    """The largest batch or sequence of a step on a device. Bytes and seconds are predicted."""

    name: SizeName
    size: int
    """The largest that fits; the next one does not, or is none."""
    target: str
    device: Device
    with_plan: bool
    budget_bytes: int
    margin_bytes: int
    """What the budget leaves free of the device's memory for what is not simulated; 0 if it was named."""
    multiple_of: int
    limit: Limit
    """Why no larger one: `memory`, the `model` (it has no more positions), because the step `refused` the
    next one, or since larger ones are not looked at (`range`)."""
    limit_text: str
    """What was said about the next size, if it is not the memory; else empty."""
    answer: SizeRow
    next: SizeRow | None
    """The next size, captured as well; None if there is none."""
    rows: tuple[SizeRow, ...]
    """Some sizes up to the largest, the smallest first."""
    captures: tuple[int, ...]
    """The sizes that were captured."""
    result: Estimate | PlanResult = field(repr=False)
    """The step with the largest size, as `estimate` or `plan` returns it."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of each stage, at least `capture` and `total`."""
    notes: tuple[str, ...] = ()
    """What is to be said about the question."""

    def __repr__(self) -> str:
        """One line; the parts have the rest."""
        plan = " with a plan" if self.with_plan else ""
        return (
            f"<MaxSize of {self.target} on {self.device.name}{plan}: {self.name} {format_count(self.size)}, "
            f"runs in {format_bytes(self.answer.smallest_memory_bytes)} of {format_bytes(self.budget_bytes)}>"
        )

    @property
    def best(self) -> SizeRow | None:
        """The row with the most tokens or samples per second; None if times are not known."""
        timed = [row for row in self.rows if row.rate is not None]
        return max(timed, key=lambda row: row.rate or 0.0, default=None)

    @property
    def timeline(self) -> Timeline:
        """The memory of the step with the largest size."""
        return self.result.timeline

    @property
    def warnings(self) -> tuple[str, ...]:
        """What had to be assumed for the step with the largest size, and what is odd about the question."""
        return self.result.warnings + self.notes
