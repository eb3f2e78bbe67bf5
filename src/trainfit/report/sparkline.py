"""Memory over the step as a few lines of signs, as wide as there is room: the shape at a glance.

Columns are stretches of the step of as many ops each; a column is as high as the most bytes in its stretch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from trainfit.basics.units import format_bytes
from trainfit.report.data import MemoryCurve

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ROWS = 3
_MOST_COLUMNS = 160
"""A wider picture says nothing more."""
_STYLES = {"forward": "cyan", "backward": "blue", "optimizer": "magenta"}


class Sparkline:
    """A memory curve as a picture with its phases below; of no more columns than the curve has points."""

    def __init__(self, curve: MemoryCurve) -> None:
        """Take the curve of a whole step."""
        self._bytes = [sum(parts) for parts in zip(*curve.by_category.values())]
        self._phases = curve.phases

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw a line of words, the picture, and the phases."""
        width = min(options.max_width, _MOST_COLUMNS, len(self._bytes))
        if width == 0:
            return
        edges = [len(self._bytes) * column // width for column in range(width + 1)]
        # The highest point of each column stands for it, also for its phase.
        highest = [max(range(first, last), key=self._bytes.__getitem__) for first, last in pairwise(edges)]
        sizes, phases = [self._bytes[point] for point in highest], [self._phases[point] for point in highest]
        top = format_bytes(max(sizes))
        yield Text(f"memory over the step, from 0 to {top} (predicted)", "dim")
        for line in picture(sizes, _ROWS):
            row = Text()
            for sign, phase in zip(line, phases):
                row.append(sign, _STYLES.get(phase, ""))
            row.no_wrap = True
            yield row
        yield Text(phase_line(phases), "dim", no_wrap=True)


def picture(sizes: Sequence[int], rows: int) -> list[str]:
    """Return lines of signs, the top one first, whose columns are as high as the sizes, from zero up."""
    levels = len(_EIGHTHS) - 1
    scale = rows * levels / max(max(sizes), 1)
    # What there is at all is seen.
    heights = [max(round(size * scale), 1) if size else 0 for size in sizes]
    return [
        "".join(_EIGHTHS[min(max(height - levels * row, 0), levels)] for height in heights)
        for row in reversed(range(rows))
    ]


def phase_line(phases: Sequence[str]) -> str:
    """Return a line of as many signs, in which every phase begins with its name if there is room."""
    line = ""
    for phase, members in groupby(phases):
        room = len(list(members))
        line += f"{phase} ".ljust(room - 1, "─") + "┤" if room > len(phase) + 1 else "─" * (room - 1) + "┤"
    return line
