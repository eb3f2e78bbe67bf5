"""What views are put together from: tables that keep to the terminal's width, safe text, warnings."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Sequence
from typing import IO

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainfit.basics.units import format_bytes
from trainfit.basics.visible_text import shortened, visible
from trainfit.report.data import Subject

_LEAST_WIDTH = 40
"""A name, a number and the space between them; narrower terminals wrap."""
_LEAST_NAME_WIDTH = 18
_LEAST_COLUMNS = 2
_LONGEST_NAME = 60
_ONE_LINE = 10_000
_PADDING = 3
MOST_WARNINGS = 10

Cell = str | Text


_PLAIN_SIGNS = str.maketrans("▁▂▃▄▅▆▇█▏×─┤±", "..::==##|x-|~")
"""What stands for signs that an output without them cannot show."""


def as_text(view: RenderableType) -> str:
    """Return what `show` prints, as plain text."""
    text = io.StringIO()
    show(view, text)
    return text.getvalue()


def show(view: RenderableType, file: IO[str] | None = None, *, one_line: bool = False) -> None:
    """Print a result: in colour on a terminal, as plain text elsewhere.

    With `one_line` it is not divided into lines where a program reads it.
    """
    stream = file or sys.stdout
    console = Console(file=stream, highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    if one_line and not console.is_terminal:
        console.width = _ONE_LINE
    with console.capture() as captured:
        console.print(view)
    # Tables fill every line up with spaces, which are of no use in a file or a transcript.
    text = "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())
    stream.write(text.translate(_PLAIN_SIGNS) if console.options.ascii_only else text)


class NumberTable:
    """A table of names with numbers beside them. Numbers are never cut.

    Where the terminal is too narrow, names are folded first; then columns are left out.
    """

    def __init__(
        self,
        first: str,
        *numbers: str,
        last: str | None = None,
        least: Sequence[str] = (),
        whole_names: bool = False,
    ) -> None:
        """Name the columns; `last` is one more that is not aligned to the right.

        `least` are those that are left out first, in this order; the others follow, the last one first. With
        `whole_names` columns are left out before names are folded.
        """
        self._least, self._whole_names = least, whole_names
        self._headers = [first, *numbers, *([] if last is None else [last])]
        self._left = () if last is None else (len(self._headers) - 1,)
        self._rows: list[tuple[Cell, ...]] = []

    def add_row(self, *cells: Cell) -> None:
        """Add a name and its numbers."""
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw as many columns as there is room for."""
        widths = [self._width(console, column) for column in range(len(self._headers))]
        name = widths[0] if self._whole_names else min(widths[0], _LEAST_NAME_WIDTH)
        shown = self._shown(widths, options.max_width - name)
        table = Table(box=None, padding=(0, _PADDING, 0, 0), pad_edge=False, header_style="dim")
        table.add_column(self._headers[0], overflow="fold")
        for column in shown[1:]:
            justify: JustifyMethod = "left" if column in self._left else "right"
            table.add_column(self._headers[column], justify=justify, no_wrap=True, min_width=widths[column])
        for row in self._rows:
            table.add_row(*(row[column] for column in shown))
        yield table

    def _shown(self, widths: Sequence[int], room: int) -> list[int]:
        """Return the columns that there is room for: the names, and one number at least."""
        shown = list(range(len(widths)))
        leaving = [self._headers.index(name) for name in self._least if name in self._headers]
        leaving += [column for column in reversed(shown) if column not in leaving]
        for column in leaving:
            if len(shown) <= _LEAST_COLUMNS or sum(_PADDING + widths[one] for one in shown[1:]) <= room:
                break
            shown.remove(column)
        return shown

    def _width(self, console: Console, column: int) -> int:
        wide = console.options.update(max_width=10_000)
        cells = (self._headers[column], *(row[column] for row in self._rows))
        return max(console.measure(cell, options=wide).maximum for cell in cells)


def margin_words(margin_bytes: int) -> str:
    """Say what the margin is for."""
    return f"the margin of {format_bytes(margin_bytes)} for what is not simulated"


def settings_lines(subject: Subject) -> list[Text]:
    """Say in one line what the step is, and in another which run of it where runs differ."""
    lines = [safe(subject.description, "dim")] if subject.description else []
    steps = subject.steps
    if not steps.differ:
        return lines
    smallest, largest = (
        format_bytes(peak or 0) for peak in (steps.smallest_peak_bytes, steps.largest_peak_bytes)
    )
    peaks, of_these = "", "and all need the same"
    if smallest != largest:
        peaks = f"with peaks from {smallest} to {largest} without workspaces, "
        of_these = "the one that needs most"
    runs = f"of runs {steps.first} to {steps.looked_at}, {peaks}this is run {steps.recorded}, {of_these}."
    return [*lines, Text().append("Steps differ: ", "yellow").append(runs)]


def stacked(
    *blocks: Sequence[RenderableType],
    warnings: Sequence[str] = (),
    footer: str = "",
    most_warnings: int = MOST_WARNINGS,
) -> Group:
    """Put blocks below each other, then warnings and a footer, with an empty line between what there is."""
    parts: list[RenderableType] = []
    for block in (*blocks, _warning_lines(warnings, most_warnings), [Text(footer, "dim")] if footer else ()):
        parts += [Text(), *block] if block else []
    return Group(*parts[1:])


def _warning_lines(warnings: Sequence[str], most: int) -> list[RenderableType]:
    """Show what was assumed, each once, and not without end."""
    counts = Counter(warnings)
    lines = [f"{warning} ({count} times)" if count > 1 else warning for warning, count in counts.items()]
    return [Text("notes", "yellow"), *indented(lines, most)] if lines else []


def indented(lines: Sequence[str], most: int) -> list[RenderableType]:
    """Show so many lines, a little to the right, and how many more there are."""
    parts: list[RenderableType] = [Padding(safe(line), (0, 0, 0, 2)) for line in lines[:most]]
    if len(lines) > most:
        parts.append(Text(f"  and {len(lines) - most} more; -v and --json list all", "dim"))
    return parts


def percent(share: float) -> str:
    """Write a share with enough digits to show that it is not zero."""
    percent = 100 * share
    return f"{percent:.2f}%" if percent >= 0.01 else f"{percent:.1g}%"


def name_text(name: str, style: str = "", longest: int = _LONGEST_NAME) -> Text:
    """Return somebody's name of something, shortened in the middle so that it does not fill the terminal."""
    return Text(shortened(visible(name), longest), style)


def safe(text: str, style: str = "") -> Text:
    """Return text that stands for itself: no markup, and nothing that would steer the terminal."""
    return Text(visible(text), style)
