"""Orders as people and programs read them: every method beside the best one, and what is proved about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from trainfit.report.json_result import SCHEMA
from trainfit.report.tables import NumberTable, safe, warning_lines
from trainfit.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from trainfit.order_fronts.order_result import OrderResult

_SOURCES = {
    "file": "the graph's",
    "graph": "the graph's",
    "joint": "the joint graph's",
    "eager": "the eager step's",
}
_LEAST_SHOWN = 0.0005
_MEANINGS = {
    "baseline": "baseline (as given)",
    "lpmf": "lpmf (least peak first)",
    "bfs": "bfs (breadth first)",
    "dfs": "dfs (depth first)",
    "tightened": "tightened",
    "search": "exact search",
    "beam": "beam search",
}


def order_view(result: OrderResult) -> RenderableType:
    """Lay out an order: the peak and how good it is, then every method, the best and the bound."""
    parts: list[RenderableType] = [_headline(result), Text(), _methods(result)]
    if result.released_at_last_use is not None:
        freest = result.released_at_last_use.peak_bytes
        parts += [Text(), Text(f"if every tensor were also freed after its last use: {format_bytes(freest)}")]
    parts += warning_lines(result.given.warnings)
    return Group(*parts, Text(), _footer(result))


def order_json(result: OrderResult) -> dict[str, Any]:
    """Return an order as a JSON object; `order` are the names of the nodes."""
    order = result.order
    freest = result.released_at_last_use
    return {
        "schema": SCHEMA,
        "target": result.given.target,
        "device": result.given.device,
        "torch": result.given.torch,
        "seconds": dict(result.seconds),
        "ops": len(order.steps),
        "warnings": list(result.given.warnings),
        "source": result.given.source,
        "baseline_peak_bytes": order.baseline_peak_bytes,
        "peak_bytes": order.peak_bytes,
        "method": order.method,
        "methods": dict(order.methods),
        "lower_bound_bytes": order.lower_bound_bytes,
        "optimal": order.optimal,
        "gap": order.gap,
        "last_use_peak_bytes": freest.peak_bytes if freest is not None else None,
        "order": list(order.names),
    }


def _headline(result: OrderResult) -> Text:
    order = result.order
    line = safe(result.given.target, "bold").append(f": {_SOURCES[result.given.source]} peak ")
    saved = order.baseline_peak_bytes - order.peak_bytes
    if saved:
        share = saved / order.baseline_peak_bytes
        # So few bytes are 0.0% less: say how many instead.
        least = f"{share:.1%}" if share >= _LEAST_SHOWN else format_bytes(saved)
        line.append(f"falls from {format_bytes(order.baseline_peak_bytes)} to ")
        line.append(format_bytes(order.peak_bytes), "bold green").append(f", {least} less (predicted); ")
    else:
        line.append("stays at ").append(format_bytes(order.peak_bytes), "bold").append(" (predicted); ")
    return line.append(order.quality)


def _methods(result: OrderResult) -> RenderableType:
    order = result.order
    table = NumberTable("order (predicted)", "peak", "of baseline")
    rows = [(_MEANINGS[method], peak, method == order.method) for method, peak in order.methods.items()]
    rows += [("best", order.peak_bytes, True), ("no order is below", order.lower_bound_bytes, False)]
    for name, peak, best in rows:
        share = f"{peak / order.baseline_peak_bytes:.1%}" if order.baseline_peak_bytes else "-"
        table.add_row(Text(name, "bold" if best else ""), format_bytes(peak), share)
    return table


def _footer(result: OrderResult) -> Text:
    seconds = result.seconds
    read = "read" if result.given.source in ("file", "graph") else "traced"
    return Text(
        f"{format_count(len(result.order.steps))} nodes, {read} in {format_seconds(seconds['capture'])}, "
        f"ordered in {format_seconds(seconds['solve'])}"
        + (f", torch {result.given.torch}" if result.given.torch else ""),
        "dim",
    )
