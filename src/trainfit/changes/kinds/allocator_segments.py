"""Expandable segments: a setting of torch's caching allocator, which then cuts memory up less."""

from __future__ import annotations

from collections.abc import Iterator

from trainfit.changes.change import StepChange
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.plans.ways import BIT_EQUAL, ChangeMade

EXPANDABLE = "expandable segments"


def changes(step: UnchangedStep) -> Iterator[StepChange]:
    """Yield the setting, for a GPU."""
    if step.device.kind == "cuda":
        code = "PYTORCH_ALLOC_CONF=expandable_segments:True"
        yield StepChange(ChangeMade("allocator", EXPANDABLE, code, BIT_EQUAL))
