"""What a reader sees of the settings of FSDP that were tried: its fields are the keys of its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ShardingRow:
    """One setting, with the fastest plan that makes it fit."""

    units: str
    """Which modules are units: `blocks`, `parts` of them, the `whole` model; `own`: those of the target."""
    unit_count: int
    kept: int
    """How many of them, the last ones, stay whole after forward."""
    prefetch: int
    fits: bool
    peak_bytes: int
    memory_bytes: int
    step_seconds: float
    exposed_communication_seconds: float
    communication_seconds: float
    recompute_seconds: float
    """What the plan adds."""
    regions: int
    chosen: bool
    usual: str
    """What it is called if it is one of the usual settings: `reshard all`, `reshard none`; else empty."""


@dataclass(frozen=True)
class ShardingData:
    """The settings of FSDP for one step, and the fastest that fits."""

    target: str
    device: str
    torch: str
    settings: dict[str, Any]
    description: str
    world_size: int
    mesh: dict[str, int]
    rank: int
    seconds: dict[str, float]
    captures: int
    budget_bytes: int
    feasible: bool
    peak_bytes: int
    memory_bytes: int
    step_seconds: float
    units: tuple[str, ...]
    kept: tuple[str, ...]
    prefetch: int
    bound_seconds: float
    """How long the GPU computes in it, with nothing recomputed: no setting is faster."""
    tried: tuple[ShardingRow, ...]
    """Each setting that was tried, the fastest that fits first."""
    warnings: tuple[str, ...]
