"""A grid as a person reads it: how many rows, the first of them, what failed."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.report.amounts import Amount, at_most, stage_times
from trainfit.report.swept_data import SweepData
from trainfit.report.tables import Cell, NumberTable, indented, safe, stacked

_MOST_ROWS = 20
_MOST_ERRORS = 5
_MOST_COLUMNS = 4
_WHOLE_ABOVE = 100
_NOTHING = Text("-", "dim")


def sweep_view(data: SweepData, amount: Amount = "usual") -> RenderableType:
    """Lay out a sweep: where the table is, its first rows, and what failed, each mistake once."""
    if amount == "verdict":
        return _swept_headline(data)
    most = at_most(_MOST_ROWS, amount)
    shown = [row for row in data.results if row["error"] is None]
    more = len(shown) - most
    rest = [Text(f"and {format_count(more)} more rows; the table has all", "dim")] if more > 0 else []
    errors = Counter(str(row["error"]) for row in data.results if row["error"] is not None)
    lines = [
        f"{error} ({format_count(count)} rows)" if count > 1 else error for error, count in errors.items()
    ]
    failed = [Text("failed", "red"), *indented(lines, at_most(_MOST_ERRORS, amount))] if lines else []
    return stacked(
        [_swept_headline(data)],
        [_first_rows(data, shown[:most]), *rest] if shown else [],
        failed,
        stage_times(data.seconds, amount),
        footer=f"torch {data.torch}, {format_seconds(data.seconds['total'])}",
    )


def _swept_headline(data: SweepData) -> Text:
    line = safe(data.grid, "bold").append(f": {format_count(data.count)} rows")
    if data.kept:
        line.append(f", {format_count(data.kept)} of them from before")
    fits = sum(row["fits"] is True for row in data.results)
    line.append(f", {format_count(fits)} fit (predicted)")
    if data.failed:
        line.append(f", {format_count(data.failed)} failed", "bold red")
    if data.output is not None:
        line.append("; the table is ").append_text(safe(data.output, "bold"))
    return line


def row_label(row: dict[str, Any], varied: tuple[str, ...]) -> str:
    """Name a row by what is not the same in all of them."""
    plain = [str(row[name]) for name in ("target", "device") if name in varied]
    return ", ".join(
        [
            *plain,
            *(f"{name} {row[name]}" for name in varied if name not in ("target", "device")),
        ]
    )


def _first_rows(data: SweepData, rows: list[dict[str, Any]]) -> NumberTable:
    """Lay out rows: what varies first, in columns of its own as long as these are few."""
    names = sorted(data.varied, key=lambda name: name not in ("target", "device"))
    first, *others = names if 0 < len(names) <= _MOST_COLUMNS else ["row"]
    table = NumberTable(first, *others, "fits", "runs in", "step", "per second")
    for row in rows:
        label = str(row[first]) if first in row else row_label(row, data.varied) or str(row["target"])
        table.add_row(
            safe(label),
            *(safe(str(row[name])) for name in others),
            _fits_cell(row),
            format_bytes(row["smallest_memory_bytes"]),
            _NOTHING if row["step_seconds"] is None else format_seconds(row["step_seconds"]),
            _rate_cell(row),
        )
    return table


def _fits_cell(row: dict[str, Any]) -> Text:
    if row["fits"]:
        return Text("yes", "green")
    return Text("close", "yellow") if row["verdict"] == "too close to call" else Text("no", "red")


def _rate_cell(row: dict[str, Any]) -> Cell:
    for unit in ("tokens", "samples"):
        rate = row[f"{unit}_per_second"]
        if rate is not None:
            return f"{format_count(round(rate)) if rate >= _WHOLE_ABOVE else f'{rate:.3g}'} {unit}"
    return _NOTHING
