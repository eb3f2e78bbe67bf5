"""What a reader sees of a grid: its fields are the keys of its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SweepData:
    """A grid of steps as one table."""

    grid: str
    """The file that says it, if one does."""
    output: str | None
    """Where the table is."""
    torch: str
    trainfit: str
    seconds: dict[str, float]
    """Wall time."""
    count: int
    """How many rows there are."""
    kept: int
    """How many of them an earlier run had done."""
    failed: int
    """How many have an error."""
    varied: tuple[str, ...]
    """The keys of the grid that have more than one value."""
    results: tuple[dict[str, Any], ...]
    """The rows, in the order of the grid; `error` says why one has no figures."""
