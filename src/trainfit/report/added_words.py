"""Sentences that terminal and page share: what a setting is worth, what a plan adds besides computing."""

from __future__ import annotations

from trainfit.basics.units import format_bytes, format_seconds
from trainfit.report.data import EstimateData, FrontierData, PlanData

SETTING = "PYTORCH_ALLOC_CONF=expandable_segments:True"
_WORTH_SAYING = 0.01
"""Of the memory that a step needs: what would save less is not mentioned."""
_NOTICEABLE = 0.005
"""Of the time of a step: less waiting than this is not shown."""


def setting_of_estimate(data: EstimateData) -> str:
    """Say how much less memory a setting of the allocator would need; empty if hardly any."""
    saved = data.expandable_saves_bytes
    if saved <= _WORTH_SAYING * data.smallest_memory_bytes:
        return ""
    return f"Set {SETTING}: it runs with {format_bytes(saved)} less."


def setting_of_plan(data: PlanData) -> str:
    """Say how much faster a plan would be with it; empty if no faster."""
    if data.expandable is None:
        return ""
    instead = f" instead of {data.added:.1%}" if data.feasible else ""
    added = f"a plan adds {data.expandable['added']:.1%}{instead} (predicted)"
    return f"With {SETTING} {added}: --allocator expandable."


def waiting_name(data: PlanData | FrontierData) -> str:
    """Name what a plan adds besides recomputation."""
    return "waits for host" if data.subject.captured_for == "cuda" else "checkpointing itself"


def waiting_words(data: PlanData | FrontierData, seconds: float) -> str:
    """Say how much of a step that is; empty if it is not worth showing."""
    if not seconds or not shows_waiting(data):
        return ""
    if data.subject.captured_for == "cuda":
        return f"the device waits {format_seconds(seconds)} of it for the host"
    return f"checkpointing itself takes {format_seconds(seconds)} of it"


def shows_waiting(data: PlanData | FrontierData) -> bool:
    """Whether it is enough to be shown."""
    if isinstance(data, PlanData):
        return data.waiting_seconds > _NOTICEABLE * data.step_seconds
    return any(point.waiting_seconds > _NOTICEABLE * point.step_seconds for point in data.points)
