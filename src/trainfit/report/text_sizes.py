"""The largest size, and several steps side by side, as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.report.amounts import Amount, at_most, stage_times, verdict_alone
from trainfit.report.sizes_data import AskedRow, SeveralSteps, SizeData
from trainfit.report.tables import (
    MOST_WARNINGS,
    Cell,
    NumberTable,
    margin_words,
    safe,
    settings_lines,
    stacked,
)
from trainfit.sizing.size_results import SizeRow

SIZE_WORDS = {"batch": "batch", "seq": "sequence"}
_WHOLE_ABOVE = 100
_ENOUGH = 0.98
"""Of the best throughput: a size that has this much is worth knowing about."""


def size_view(data: SizeData, amount: Amount = "usual") -> RenderableType:
    """Lay out the largest size: what it needs, why no larger one, throughput over sizes."""
    subject = data.subject
    if amount == "verdict":
        return verdict_alone(_headline(data), subject.warnings)
    return stacked(
        [_headline(data), *settings_lines(subject)],
        [safe(why_no_larger(data))],
        [_sizes(data)],
        [_best(data)] if data.best_size is not None else [],
        stage_times(subject.seconds, amount),
        warnings=subject.warnings,
        most_warnings=at_most(MOST_WARNINGS, amount),
        footer=_footer(data),
    )


def _headline(data: SizeData) -> Text:
    line = safe(data.subject.target, "bold").append(" on ").append_text(safe(data.subject.device))
    if data.subject.world_size > 1:
        line.append(f", rank {format_count(data.subject.rank)} of {format_count(data.subject.world_size)}")
    line.append(": the largest ").append(SIZE_WORDS[data.size_name])
    line.append(" with a plan" if data.with_plan else " that fits").append(" is ")
    line.append(format_count(data.size), "bold green")
    line.append(f", which runs in {format_bytes(data.smallest_memory_bytes)}")
    line.append(f" of {format_bytes(data.budget_bytes)} (predicted)")
    if data.step_seconds is not None:
        line.append("; ").append(format_seconds(data.step_seconds), "bold").append(" per step")
    if data.plan_adds is not None:
        none = "and needs no plan"
        line.append(f", {f'of which the plan adds {data.plan_adds:.1%}' if data.plan_adds else none}")
    return line


def why_no_larger(data: SizeData) -> str:
    """Say why there is no larger one."""
    word = data.size_name
    if data.limit == "model":
        return f"The model is the limit, not the memory: {data.limit_text}"
    if data.limit == "range":
        size = format_count(data.size)
        return f"Everything fits up to {word} {size}, beyond which nothing is looked at."
    following = format_count(data.size + data.multiple_of)
    if data.limit == "refused":
        return f"The step does not take {word} {following}: {data.limit_text}"
    missing = 0 if data.next is None else data.next.smallest_memory_bytes - data.budget_bytes
    needs = f": {format_bytes(missing)} missing" if missing > 0 else ""
    verdict = "no plan makes it fit" if data.with_plan else "it does not fit"
    return f"With {word} {following} {verdict}{needs} (predicted, captured as well)."


def _sizes(data: SizeData) -> NumberTable:
    timed = data.step_seconds is not None
    rated = _rated(data.sizes)
    columns = [*(("step",) if timed else ()), *(f"{name}/s" for name in rated), "runs in", "peak"]
    columns += ["plan adds"] if data.with_plan else []
    table = NumberTable(f"{SIZE_WORDS[data.size_name]} (predicted)", *columns, last="figure")
    for row in data.sizes:
        cells: list[Cell] = [_seconds(row.step_seconds)] if timed else []
        cells += [_rate(getattr(row, f"{name}_per_second")) for name in rated]
        cells += [format_bytes(row.smallest_memory_bytes), format_bytes(row.peak_bytes)]
        cells += [_adds(row.plan_adds)] if data.with_plan else []
        best = row.size == data.best_size
        name = Text(format_count(row.size), "bold" if best else "")
        table.add_row(name, *cells, Text("captured" if row.captured else "worked out", "dim"))
    return table


def _rated(rows: Sequence[SizeRow] | Sequence[AskedRow]) -> list[str]:
    """Return what rows are compared by: tokens per second, or samples if there are none."""
    known = [
        name
        for name in ("tokens", "samples")
        if any(getattr(row, f"{name}_per_second") is not None for row in rows)
    ]
    return known[:1]


def _best(data: SizeData) -> Text:
    best = next(row for row in data.sizes if row.size == data.best_size)
    unit = "samples" if best.tokens_per_second is None else "tokens"
    line = Text(f"Of these, {data.size_name} ").append(format_count(best.size), "bold")
    line.append(f" has the best throughput: {_rate(best.rate)} {unit}/s.")
    enough = next(row for row in data.sizes if (row.rate or 0.0) >= _ENOUGH * (best.rate or 0.0))
    if enough.size < best.size:
        share = (enough.rate or 0.0) / (best.rate or 1.0)
        line.append(f" With {format_count(enough.size)} it is {share:.1%} of that already.")
    return line


def _footer(data: SizeData) -> str:
    captured = ", ".join(format_count(size) for size in data.captured_sizes)
    seconds = data.subject.seconds
    lines = [
        f"budget: the device without {margin_words(data.margin_bytes)}" if data.margin_bytes else "",
        f"captured with {data.size_name} {captured} in {format_seconds(seconds.get('capture', 0.0))}, "
        f"found in {format_seconds(seconds['total'])}, torch {data.subject.torch}",
    ]
    return "\n".join(line for line in lines if line)


def several_view(data: SeveralSteps, amount: Amount = "usual") -> RenderableType:
    """Lay out several steps, one row for each."""
    if amount == "verdict":
        return Text("\n").join(_one_line(row) for row in data.rows)
    timed = any(row.step_seconds is not None for row in data.rows)
    rated = _rated(data.rows)
    columns = ["batch", "fits", "runs in", "peak", *(("step",) if timed else ())]
    columns += ["plan adds"] if data.planned else []
    table = NumberTable("device (predicted)", *columns, *(f"{name}/s" for name in rated))
    for row in data.rows:
        cells: list[Cell] = ["-" if row.batch is None else format_count(row.batch), _fits(row.fits)]
        cells += [format_bytes(row.smallest_memory_bytes), format_bytes(row.peak_bytes)]
        cells += [_seconds(row.step_seconds)] if timed else []
        cells += [_adds(row.plan_adds)] if data.planned else []
        cells += [_rate(getattr(row, f"{name}_per_second")) for name in rated]
        table.add_row(safe(row.device), *cells)
    return stacked(
        [safe(data.rows[0].target, "bold")],
        [table],
        warnings=data.warnings,
        most_warnings=at_most(MOST_WARNINGS, amount),
    )


def _one_line(row: AskedRow) -> Text:
    batch = "" if row.batch is None else f", batch {format_count(row.batch)}"
    line = safe(f"{row.target} on {row.device}{batch}: ").append_text(_fits(row.fits, "fits", "does not fit"))
    line.append(f", runs in {format_bytes(row.smallest_memory_bytes)} (predicted)")
    return line.append("" if row.step_seconds is None else f", {format_seconds(row.step_seconds)} per step")


def _fits(fits: bool, yes: str = "yes", no: str = "no") -> Text:
    return Text(yes, "green") if fits else Text(no, "red")


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _adds(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _rate(rate: float | None) -> str:
    if rate is None:
        return "-"
    return format_count(round(rate)) if rate >= _WHOLE_ABOVE else f"{rate:.3g}"
