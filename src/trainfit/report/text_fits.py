"""Ways to make a step fit, as a person reads them: what to change, what it brings, the lines of code."""

from __future__ import annotations

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.report.amounts import Amount, at_most, stage_times, verdict_alone
from trainfit.report.fit_data import FitData, WayRow
from trainfit.report.tables import MOST_WARNINGS, NumberTable, indented, safe, settings_lines, stacked

_MOST_CODE = 3
"""Of so many ways the lines of code are shown."""


def fit_view(data: FitData, amount: Amount = "usual") -> RenderableType:
    """Lay out the ways: the answer first, all of them side by side, then how each is made."""
    subject = data.subject
    if amount == "verdict":
        return verdict_alone(_headline(data), subject.warnings)
    impossible = [f"{one['change']}: {one['reason']}" for one in data.impossible]
    return stacked(
        [_headline(data), *settings_lines(subject)],
        [_table(data)],
        _code(data.ways_found[: at_most(_MOST_CODE, amount)]),
        [Text("not possible here", "dim"), *indented(impossible, at_most(5, amount))] if impossible else [],
        stage_times(subject.seconds, amount),
        warnings=subject.warnings,
        most_warnings=at_most(MOST_WARNINGS, amount),
        footer=_footer(data),
    )


def _headline(data: FitData) -> Text:
    subject = data.subject
    line = safe(subject.target, "bold").append(" on ").append_text(safe(subject.device)).append(": ")
    base, budget = data.as_it_is, format_bytes(data.budget_bytes)
    if not data.ways_found:
        needs = format_bytes(base.smallest_memory_bytes)
        line.append("nothing that was tried fits", "bold red")
        return line.append(f" into {budget}; as it is the step needs {needs} (predicted)")
    best = data.ways_found[0]
    if data.fits:
        line.append("fits as it is", "bold green")
        line.append(f" ({format_bytes(base.smallest_memory_bytes)} of {budget})")
    else:
        line.append("does not fit as it is", "bold red")
        line.append(f" ({format_bytes(base.smallest_memory_bytes)} of {budget})")
    if best.name == base.name:
        return line.append(", and nothing that was tried is faster (predicted)")
    faster = (
        f"{best.speed:.2f} times as fast" if data.fits else f"{format_seconds(best.step_seconds)} per step"
    )
    return (
        line.append(". The fastest way: ")
        .append_text(safe(best.name, "bold"))
        .append(f"; {faster}, in {format_bytes(best.smallest_memory_bytes)} (predicted).")
    )


def _table(data: FitData) -> NumberTable:
    tokens = data.as_it_is.tokens_per_second is not None
    throughput = "tokens/s" if tokens else "samples/s"
    table = NumberTable("way (predicted)", "runs in", "step", throughput, "results", last="fits")
    rows = [(number, way, True) for number, way in enumerate(data.ways_found, start=1)]
    shown = [(f"{number} {way.name}", way, fits) for number, way, fits in rows]
    if not data.fits:
        shown.append((data.as_it_is.name, data.as_it_is, False))
    for name, way, fits in shown:
        per_second = way.tokens_per_second if tokens else way.samples_per_second
        table.add_row(
            safe(name, "bold" if name.startswith("1 ") else ""),
            format_bytes(way.smallest_memory_bytes),
            format_seconds(way.step_seconds),
            "-" if per_second is None else f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2f}",
            way.results,
            Text("yes", "green") if fits else Text("no", "red"),
        )
    return table


def _code(ways: tuple[WayRow, ...]) -> list[RenderableType]:
    """Show the lines that make each way."""
    lines: list[RenderableType] = []
    for number, way in enumerate(ways, start=1):
        if way.code:
            lines.append(Text(f"way {number}", "dim"))
            lines += [Padding(safe(code), (0, 0, 0, 2)) for code in way.code]
    return lines


def _footer(data: FitData) -> str:
    subject = data.subject
    lines = [
        ""
        if data.complete
        else "time was up before every combination that might be better was looked at; --seconds gives more",
        f"{format_count(data.looked_at)} combinations captured in "
        f"{format_seconds(subject.seconds.get('total', 0.0))}, torch {subject.torch}",
    ]
    return "\n".join(line for line in lines if line)
