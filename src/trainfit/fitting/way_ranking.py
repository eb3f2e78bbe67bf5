"""Which ways are worth showing: those that no other beats in results, effort and time together."""

from __future__ import annotations

from collections.abc import Iterable

from trainfit.plans.ways import EXACTNESS, Exactness, Way

_CLEARLY = 1e-3
"""A share of the step: what is faster by less is not worth another change."""


def rank(exactness: Exactness) -> int:
    """Return how much of the results changes, from 0 on."""
    return EXACTNESS.index(exactness)


def is_as_good_as(one: Way, exactness: Exactness, count: int, step_seconds: float) -> bool:
    """Whether a way changes results no more, does no more things differently, and is not clearly slower."""
    no_slower = one.step_seconds <= step_seconds * (1 + _CLEARLY)
    return rank(one.exactness) <= rank(exactness) and one.count <= count and no_slower


def not_beaten(ways: Iterable[Way]) -> list[Way]:
    """Return the ways that no other beats, the fastest first."""
    kept: list[Way] = []
    for way in sorted(ways, key=lambda way: (way.count, rank(way.exactness), way.step_seconds)):
        figures = way.exactness, way.count, way.step_seconds
        if not any(is_as_good_as(other, *figures) for other in kept):
            kept.append(way)
    return sorted(kept, key=lambda way: (way.step_seconds, way.count, rank(way.exactness)))
