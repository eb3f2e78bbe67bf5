"""Expandable segments: a setting of torch's caching allocator, which then cuts memory up less."""

from __future__ import annotations

from collections.abc import Iterator

from trainfit.changes.change import Change
from trainfit.changes.situation import Situation
from trainfit.plans.ways import BIT_EQUAL, ChangeMade

EXPANDABLE = "expandable segments"


def changes(situation: Situation) -> Iterator[Change]:
    """Yield the setting, for a GPU."""
    if situation.device.kind == "cuda":
        code = "PYTORCH_ALLOC_CONF=expandable_segments:True"
        yield Change(ChangeMade("allocator", EXPANDABLE, code, BIT_EQUAL))
