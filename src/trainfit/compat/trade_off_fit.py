"""Straight lines through the trade-off of a module: share of its bytes discarded, share of its time added.

The greedy order gives a convex curve of points. Lines between some of them lie above it, so what they promise
can be kept; which points is chosen so that the squared distance to all points is the smallest.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from trainfit.compat.sac_records import SACGreedyOrderMeta, SACStats, SACTradeOffStats

Point = tuple[float, float]
_MOST_POINTS = 200
"""More are thinned out before lines are laid through them."""


def fitted(stats: SACStats, order: SACGreedyOrderMeta, most_lines: int) -> SACTradeOffStats:
    """Return the trade-off of a module with at most so many lines."""
    total_bytes, total_runtime = sum(stats.memory), sum(stats.runtimes)
    points = _points(stats, order, total_bytes, total_runtime)
    chosen = _breakpoints(points, most_lines)
    slopes, intercepts = [], []
    for (left, low), (right, high) in itertools.pairwise(chosen):
        slope = (high - low) / (right - left)
        slopes.append(slope)
        intercepts.append(low - slope * left)
    if not slopes:  # nothing can be discarded, or everything at once for nothing
        slopes, intercepts = [0.0], [chosen[0][1]]
        chosen = [(0.0, chosen[0][1]), (1.0, chosen[0][1])]
    breaks = [share for share, _ in chosen]
    curve = OrderedDict(points)
    return SACTradeOffStats(len(slopes), slopes, intercepts, breaks, curve, total_bytes, total_runtime)


def _points(
    stats: SACStats, order: SACGreedyOrderMeta, total_bytes: int, total_runtime: float
) -> list[Point]:
    """Return what discarding one group after another adds up to, as shares; rising in both."""
    views = [op for head in order.recomputed_ops for op in order.group_of(head)]
    discarded = sum(stats.memory[op] for op in views)
    again = sum(stats.runtimes[op] for op in views)
    steps = [(discarded, again)]
    for one in order.msps_meta:
        discarded, again = discarded + one.memory, again + one.runtime
        steps.append((discarded, again))
    shares = {
        size / total_bytes if total_bytes else 0.0: time / total_runtime if total_runtime else 0.0
        for size, time in reversed(steps)  # of points at one place, the first one counts
    }
    return sorted(shares.items())


def _breakpoints(points: Sequence[Point], most_lines: int) -> list[Point]:
    """Choose the points that lines go through: the first, the last, and the best ones between."""
    if len(points) > _MOST_POINTS:
        places = np.linspace(0, len(points) - 1, _MOST_POINTS).round().astype(int)
        points = [points[place] for place in dict.fromkeys(places.tolist())]
    x, y = (np.array(column) for column in zip(*points))

    @functools.cache
    def distance(first: int, last: int) -> float:
        inside = slice(first, last + 1)
        line = np.interp(x[inside], x[[first, last]], y[[first, last]])
        return float(((y[inside] - line) ** 2).sum())

    last = len(points) - 1
    # best[n] is the smallest distance of n lines up to a point, and the point before it.
    best = [(0.0 if place == 0 else np.inf, -1) for place in range(last + 1)]
    history = []
    for _ in range(min(most_lines, last)):
        best = [
            min(
                ((best[before][0] + distance(before, place), before) for before in range(place)),
                default=(np.inf, -1),
            )
            for place in range(last + 1)
        ]
        history.append(best)
    chosen = [last]
    for row in reversed(history):
        chosen.append(row[chosen[-1]][1])
    return [points[place] for place in reversed(chosen)]
