"""The prices per byte at which the cheapest cut changes, found by asking where two cuts cost the same.

At one price two cuts cost the same. Either they are the cheapest there, or another one is, which then lies
between them (Eisner and Severance, 1976). A row of prices that is given beforehand passes over cuts that are
the cheapest for few prices only: operators of one kind have much the same seconds per byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from trainfit.compiling.recompute_problem import Partition


def look_at_corners(at: Callable[[float], Partition | None], most: int) -> None:
    """Ask for the cheapest partitions at prices from 0 to infinite, `most` of them at the most."""
    pending = [(0.0, math.inf)]
    while pending and most:
        low, high = pending.pop(0)
        fast, small = at(low), at(high)
        if fast is None or small is None or fast.kept_bytes <= small.kept_bytes:
            continue
        price = (small.seconds - fast.seconds) / (fast.kept_bytes - small.kept_bytes)
        if not low < price < high:
            continue
        most -= 1
        between = at(price)
        if between is not None and between.kept not in (fast.kept, small.kept):
            pending += [(low, price), (price, high)]
