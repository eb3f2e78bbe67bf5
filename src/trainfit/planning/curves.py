"""The trade-off of one region: bytes kept between forward and backward against seconds of recomputation.

Every vertex of the curve's convex hull is the cheapest choice for some price per byte, so the hull is found
exactly by asking for the cheapest choice at the slope between two known vertices, until no vertex is new.
"""

from __future__ import annotations

from trainfit.planning.minimum_cut import Choice, cheapest
from trainfit.planning.regions import Group

_MOST_POINTS = 40
_NEARLY_FREE = 1e-18
_PRICELESS = 1e3
"""Seconds per byte: so low that time decides, and so high that bytes decide."""


def curve_of(groups: list[Group]) -> list[Choice]:
    """Return the vertices of the hull, fewest bytes first; empty if the region cannot be checkpointed."""
    most, least = cheapest(groups, _NEARLY_FREE), cheapest(groups, _PRICELESS)
    if most is None or least is None:
        return []
    points = {(point.bytes, point.seconds): point for point in (least, most)}
    pending = [(least, most)]
    while pending and len(points) < _MOST_POINTS:
        low, high = pending.pop()
        if high.bytes <= low.bytes or low.seconds <= high.seconds:
            continue
        price = (low.seconds - high.seconds) / (high.bytes - low.bytes)
        between = cheapest(groups, price)
        if between is None or not _below(between, low, price):
            continue
        if (between.bytes, between.seconds) not in points:
            points[between.bytes, between.seconds] = between
            pending += [(low, between), (between, high)]
    return _undominated(sorted(points.values(), key=lambda point: (point.bytes, point.seconds)))


def _below(point: Choice, end: Choice, price: float) -> bool:
    """Whether a point lies below the line through `end` with this slope, by more than rounding."""
    line = end.seconds + price * end.bytes
    return point.seconds + price * point.bytes < line * (1 - 1e-9)


def _undominated(points: list[Choice]) -> list[Choice]:
    found: list[Choice] = []
    for point in points:
        if not found or point.seconds < found[-1].seconds:
            found.append(point)
    return found
