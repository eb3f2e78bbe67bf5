"""What figures are called and how they are written, wherever a person reads them."""

from __future__ import annotations

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.report.diff_data import DiffData

FIGURE_WORDS = {
    "peak_bytes": "peak",
    "persistent_bytes": "before the step",
    "forward_bytes": "forward",
    "backward_bytes": "backward",
    "optimizer_bytes": "optimizer",
    "allocated_peak_bytes": "allocated",
    "reserved_peak_bytes": "reserved",
    "smallest_memory_bytes": "runs in",
    "budget_bytes": "budget",
    "step_seconds": "step",
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "optimizer_seconds": "optimizer",
    "recompute_seconds": "recomputation",
    "communication_seconds": "communication",
    "flops": "FLOPs",
    "ops": "ops",
}
MODULE_STATES = {"added": "new", "removed": "gone", "changed": "", "renamed": ""}
_LARGE = ("", "k", "M", "G", "T", "P", "E")
_THOUSAND = 999.5
"""From here on three digits would round to a thousand of the unit."""


def written(unit: str, figure: float | None) -> str:
    """Write a figure; the end of its key says what it is in."""
    if figure is None:
        return "-"
    if unit.endswith("_seconds"):
        return format_seconds(figure)
    if unit == "flops":
        return _large(figure)
    return format_bytes(int(figure)) if unit.endswith("_bytes") else format_count(int(figure))


def _large(count: float) -> str:
    """Write `7.17 T` instead of thirteen digits."""
    power = 0
    while count >= _THOUSAND and power < len(_LARGE) - 1:
        count, power = count / _THOUSAND, power + 1
    return f"{count:.3g} {_LARGE[power]}" if power else format_count(int(count))


def written_change(unit: str, change: float | None) -> str:
    """Write a change with its sign; a dash if there is none."""
    if not change:
        return "-"
    return f"{'+' if change > 0 else '-'}{written(unit, abs(change))}"


def peak_moved(data: DiffData) -> str:
    """Say where the peak is, if it is elsewhere now: then what is alive at it is something else."""
    old, new = data.old.peak_at, data.new.peak_at
    if not old or not new or old == new:
        return ""
    return f"The peak moved: from {old}, to {new}. What is alive there is not the same."
