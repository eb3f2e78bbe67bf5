"""What may grow by how much: shares as people write them, and what is more than they allow."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from trainfit.basics.units import format_bytes, format_seconds
from trainfit.errors import OptionError
from trainfit.report.diff_data import Change

_PERCENT = re.compile(r"\s*([0-9]{1,6}(?:\.[0-9]{1,9})?)\s*%\s*")
_ROUNDING = 1e-9
"""Of the old figure: what is said to be allowed exactly is allowed."""


@dataclass(frozen=True)
class AllowedGrowth:
    """By which share the peak and the step's time may grow; None: by any."""

    peak_share: float | None = None
    time_share: float | None = None


def parse_share(given: str | float | None, name: str) -> float | None:
    """Read `2%` as a share; from Python a number is a share itself, 0.02."""
    if given is None:
        return None
    if isinstance(given, str):
        match = _PERCENT.fullmatch(given)
        if match is None:
            raise OptionError(f"{name} {given[:40]}: write a percentage from 0% on, such as 2% or 0.5%.")
        return float(match[1]) / 100
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < math.inf:
        raise OptionError(
            f"{name} is a share from 0 on, such as 0.02, or a text such as '2%', got {given!r}."
        )
    return float(given)


def exceeded(allowed: AllowedGrowth, peak: Change, time: Change | None) -> tuple[str, ...]:
    """Return what grew by more than is allowed, as sentences."""
    found: list[str] = []
    if allowed.time_share is not None and time is None:
        raise OptionError(
            "--max-time needs the step's time on both sides, and it is not known: of traces it is only with "
            "--device."
        )
    for what, one, share in (("peak", peak, allowed.peak_share), ("step", time, allowed.time_share)):
        if one is None or share is None or one.old is None or one.new is None:
            continue
        if one.new > one.old * (1 + share) + _ROUNDING * one.old:
            old, new = (
                format_bytes(int(side)) if what == "peak" else format_seconds(side)
                for side in (one.old, one.new)
            )
            grown = "from nothing" if one.share is None else f"by {one.share:.2%}"
            found.append(f"the {what} grew {grown}, from {old} to {new}; allowed is {share:.2%}")
    return tuple(found)
