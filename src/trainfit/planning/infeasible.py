"""The message of a budget that no plan meets: what the smallest peak is made of, and what would lower it."""

from __future__ import annotations

from trainfit.basics.units import format_bytes
from trainfit.costs.estimates import peak_of
from trainfit.planning.plan_results import PlanResult


def too_small(result: PlanResult) -> str:
    """Say that no plan fits, what the smallest peak is made of, where it is and what would lower it."""
    by_category = sorted(result.timeline.peak_by_category.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{format_bytes(size)} {name.replace('_', ' ')}" for name, size in by_category if size)
    peak = peak_of(result.timeline)
    return (
        f"no plan fits into {format_bytes(result.plan.budget_bytes)}{_without_margin(result)}. "
        f"{_least(result)}The smallest peak that was found is "
        f"{format_bytes(result.plan.peak_bytes)} ({parts}), "
        f"in the {peak.phase} of {peak.module} at {peak.op}."
        f"{_within_margin(result)}{_expandable(result)}{_what_would(result)}"
    )


def _least(result: PlanResult) -> str:
    """Say what the allocator needs, where that is more than the peak."""
    if result.plan.memory_bytes == result.plan.peak_bytes:
        return ""
    return f"The least that was found to run needs {format_bytes(result.plan.memory_bytes)}. "


def _expandable(result: PlanResult) -> str:
    """Say that another setting of the allocator would do, where it would."""
    if result.expandable_added is None:
        return ""
    return (
        " With PYTORCH_ALLOC_CONF=expandable_segments:True a plan fits and adds "
        f"{result.expandable_added:.1%} (predicted): --allocator expandable."
    )


def _what_would(result: PlanResult) -> str:
    """Say what would lower the smallest peak; computing activations again is used up."""
    found = result.advice
    if not found:
        return " A larger device, or more of them, is what is left."
    return " What would lower it:" + "".join(f"\n  {one.text}" for one in found)


def _without_margin(result: PlanResult) -> str:
    if not result.margin_bytes:
        return ""
    usable, margin = format_bytes(result.device.usable_bytes), format_bytes(result.margin_bytes)
    return f" ({usable} less a margin of {margin} for what is not simulated)"


def _within_margin(result: PlanResult) -> str:
    """Say how to plan without the margin where that would do."""
    if not result.margin_bytes or result.plan.memory_bytes > result.device.usable_bytes:
        return ""
    return (
        " Without the margin it would fit: --budget 100% plans so. Whether that runs is too close to call; "
        "PYTORCH_ALLOC_CONF=expandable_segments:True makes it likelier."
    )
