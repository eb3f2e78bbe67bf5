"""What a reader sees of two results beside each other, as plain data: its fields are the keys of its JSON.

Only what is not the same on both sides is listed, the largest change first. What is on one side only has no
figure on the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["changed", "added", "removed", "renamed"]


@dataclass(frozen=True)
class DiffSide:
    """One of the two results."""

    name: str
    """Its file, or what it was called."""
    target: str
    device: str
    torch: str
    ops: int
    peak_at: str
    """Where the peak is, in words; empty if nobody knows."""


@dataclass(frozen=True)
class OtherValue:
    """Something that the two results were asked for differently."""

    name: str
    old: str
    new: str


@dataclass(frozen=True)
class Change:
    """A figure on both sides. Bytes are whole numbers; seconds are not."""

    name: str
    old: float | None
    new: float | None
    change: float | None
    share: float | None
    """The change as a share of the old figure; None if that is zero or not known."""


@dataclass(frozen=True)
class ModuleChange:
    """A module with all inside of it, or modules that differ by numbers in their names, summed up."""

    module: str
    """With `*` for the numbers."""
    was: str
    """The old name, if it is another."""
    state: State
    class_name: str
    old_count: int
    new_count: int
    old_held_bytes: int
    new_held_bytes: int
    held_change_bytes: int
    """Parameters, buffers, and what the modules made that is alive at the peak."""
    parameter_change_bytes: int
    activation_change_bytes: int
    """What forward leaves alive for backward."""
    old_seconds: float | None
    new_seconds: float | None
    change_seconds: float | None
    """Forward and backward."""
    explained_inside: bool
    """Whether one module inside of it says nearly the same."""


@dataclass(frozen=True)
class OperatorChange:
    """All calls of an operator; seconds are None where costs are not known."""

    operator: str
    old_calls: int
    new_calls: int
    old_seconds: float | None
    new_seconds: float | None
    change_seconds: float | None


@dataclass(frozen=True)
class RegionChange:
    """The regions of two plans, by module."""

    module: str
    old_regions: int
    new_regions: int
    old_kept_bytes: int
    new_kept_bytes: int
    old_recompute_seconds: float
    new_recompute_seconds: float


@dataclass(frozen=True)
class DiffData:
    """Two results: what grew, by how much, and whether that is more than was allowed."""

    kind: str
    """`estimate`, `plan` or `trace`."""
    old: DiffSide
    new: DiffSide
    others: tuple[OtherValue, ...]
    """What was asked for differently: figures are compared all the same."""
    figures: tuple[Change, ...]
    """All of them, changed or not."""
    categories: tuple[Change, ...]
    """Bytes at the peak."""
    modules: tuple[ModuleChange, ...]
    operators: tuple[OperatorChange, ...]
    regions: tuple[RegionChange, ...]
    peak_share: float | None
    """By how much the peak grew, as a share of the old one."""
    time_share: float | None
    """The same of the step's time; None where one is not known."""
    max_peak_share: float | None
    max_time_share: float | None
    """What was allowed."""
    exceeded: tuple[str, ...]
    """What is more than that, as sentences."""

    def figure(self, name: str) -> Change:
        """Return the figure of that name."""
        return next(one for one in self.figures if one.name == name)
