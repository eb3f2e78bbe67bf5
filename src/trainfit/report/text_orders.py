"""Orders as a person reads them: every method beside the best one, and what is proved about it."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.report.amounts import Amount, at_most, stage_times, verdict_alone
from trainfit.report.ordered_data import OrderData
from trainfit.report.tables import MOST_WARNINGS, NumberTable, safe, stacked

_SOURCES = {"joint": "the joint graph's", "eager": "the eager step's"}
_LEAST_SHOWN = 0.0005
_MEANINGS = {
    "baseline": "baseline (as given)",
    "lpmf": "lpmf (least peak first)",
    "bfs": "bfs (breadth first)",
    "dfs": "dfs (depth first)",
    "search": "exact search",
    "beam": "beam search",
    "bound": "no order is below",
}


def order_view(data: OrderData, amount: Amount = "usual") -> RenderableType:
    """Lay out an order: the peak and how good it is, then every method, the best and the bound."""
    if amount == "verdict":
        return verdict_alone(_headline(data), data.warnings)
    table = NumberTable("order (predicted)", "peak", "of baseline")
    for row in data.rows:
        name = Text(_MEANINGS.get(row.name, row.name), "bold" if row.best else "")
        table.add_row(name, format_bytes(row.peak_bytes), "-" if row.share is None else f"{row.share:.1%}")
    freed = data.last_use_peak_bytes
    line = f"if every tensor were also freed after its last use: {format_bytes(freed or 0)}"
    return stacked(
        [_headline(data)],
        [table],
        [] if freed is None else [Text(line)],
        stage_times(data.seconds, amount),
        warnings=data.warnings,
        most_warnings=at_most(MOST_WARNINGS, amount),
        footer=_footer(data),
    )


def _headline(data: OrderData) -> Text:
    whose = _SOURCES.get(data.source, "the graph's")
    line = safe(data.target, "bold").append(f": {whose} peak ")
    peak = format_bytes(data.peak_bytes)
    if data.saved_bytes:
        # So few bytes are 0.0% less: say how many instead.
        many = data.saved_share >= _LEAST_SHOWN
        less = f"{data.saved_share:.1%}" if many else format_bytes(data.saved_bytes)
        line.append(f"falls from {format_bytes(data.baseline_peak_bytes)} to ")
        line.append(peak, "bold green").append(f", {less} less (predicted); ")
    else:
        line.append("stays at ").append(peak, "bold").append(" (predicted); ")
    return line.append(data.quality)


def _footer(data: OrderData) -> str:
    read = "read" if data.source in ("file", "graph") else "traced"
    return (
        f"{format_count(data.ops)} nodes, {read} in {format_seconds(data.seconds['capture'])}, "
        f"ordered in {format_seconds(data.seconds['solve'])}"
        f"{f', torch {data.torch}' if data.torch else ''}"
    )
