"""What a reader sees of an order, as plain data (`data.py` has the rest)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OrderRow:
    """The peak that one method reached, or that of the best order, or the one that no order is below."""

    name: str
    peak_bytes: int
    share: float | None
    """Of the peak of the order as it was given; None if that is zero."""
    best: bool


@dataclass(frozen=True)
class OrderData:
    """An order: its peak beside that of the order as given, how good it is, what each method reached."""

    target: str
    device: str | None
    torch: str | None
    seconds: dict[str, float]
    ops: int
    warnings: tuple[str, ...]
    source: str
    """`file`, `graph`, `joint` or `eager`."""
    baseline_peak_bytes: int
    peak_bytes: int
    method: str
    methods: dict[str, int]
    lower_bound_bytes: int
    optimal: bool
    gap: float
    last_use_peak_bytes: int | None
    """For an eager step: the best peak if every tensor were also freed after its last use."""
    order: tuple[str, ...]
    """The names of the nodes."""
    quality: str
    saved_bytes: int
    saved_share: float
    """Of the peak of the order as it was given."""
    rows: tuple[OrderRow, ...]
