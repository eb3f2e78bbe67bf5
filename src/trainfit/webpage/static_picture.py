"""The memory picture as SVG: for notebooks, and for a page before its scripts have run or where none may."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from trainfit.basics.units import format_bytes
from trainfit.traces.simulate import Bytes, Timeline
from trainfit.traces.trace import CATEGORIES
from trainfit.webpage.first_screen import STACKED

_COLUMNS = 400
"""So many of the highest moments: more than can be told apart on a screen's width."""
_BESIDES = 1.8
"""Times the peak; the page's own picture has the same bound."""
_WIDTH, _HEIGHT = 1000.0, 260.0


def static_picture(timeline: Timeline, limit_bytes: int | None) -> str:
    """Return memory over the ops of a step, stacked by category; empty if nothing runs."""
    count = len(timeline.live_bytes)
    if not count:
        return ""
    columns = min(_COLUMNS, count)
    edges = [count * column // columns for column in range(columns + 1)]
    ops = [first + int(timeline.used_bytes[first:last].argmax()) for first, last in pairwise(edges)]
    rows = timeline.by_category[:, ops].copy()
    rows[CATEGORIES.index("temporary")] += timeline.workspace_bytes[ops]
    shown = None if limit_bytes is None or is_far(timeline, limit_bytes) else limit_bytes
    top = max(timeline.peak_bytes, shown or 0, 1) * 1.05
    width = _WIDTH / columns
    below = np.zeros(columns, dtype=np.int64)
    areas = []
    for name in STACKED:
        row = rows[CATEGORIES.index(name)]
        if row.any():
            areas.append(f'<path class="tf-c-{name}" d="{_area(below, below + row, width, top)}"/>')
            below = below + row
    lines = ""
    if shown is not None:
        y = _HEIGHT * (1 - shown / top)
        lines = f'<line class="tf-limit" x1="0" x2="{_WIDTH:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
    peak = format_bytes(timeline.peak_bytes)
    said = f"Memory over the {count} ops of the step, predicted; the peak is {peak}"
    return (
        f'<svg class="tf-picture" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" preserveAspectRatio="none" role="img" '
        f'aria-label="{said}">{"".join(areas)}{lines}</svg>'
    )


def is_far(timeline: Timeline, limit_bytes: int) -> bool:
    """Whether the limit is so far above the peak that with it the picture would be flat."""
    return limit_bytes > _BESIDES * max(timeline.peak_bytes, 1)


def _area(low: Bytes, high: Bytes, width: float, top: float) -> str:
    """Return the outline of an area that is constant within each column, points that say nothing left out."""
    upper = _steps(high, width, top)
    lower = _steps(low, width, top)
    return "M" + "L".join(upper) + "L" + "L".join(reversed(lower)) + "Z"


def _steps(values: Bytes, width: float, top: float) -> list[str]:
    heights = [f"{_HEIGHT * (1 - value / top):.1f}" for value in values.tolist()]
    points = []
    for column, height in enumerate(heights):
        if column == 0 or height != heights[column - 1]:
            points.append(f"{column * width:.1f},{height}")
        if column == len(heights) - 1 or height != heights[column + 1]:
            points.append(f"{(column + 1) * width:.1f},{height}")
    return points
