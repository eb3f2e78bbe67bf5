"""The page of the largest size: the number, throughput over sizes, then the step with that size."""

from __future__ import annotations

from typing import Any

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.costs.estimates import Estimate
from trainfit.report.reading import estimate_data, plan_data
from trainfit.report.sizes_data import SizeData
from trainfit.report.text_sizes import SIZE_WORDS, why_no_larger
from trainfit.webpage import page_sections
from trainfit.webpage.page_answers import GOOD, Figure, FirstScreen
from trainfit.webpage.page_parts import Part, Section, Strings, column, table


def size_answer(data: SizeData) -> FirstScreen:
    """Say which size is the largest, what it needs and why no larger one."""
    word = SIZE_WORDS[data.size_name]
    figures = [
        Figure(f"largest {word}", format_count(data.size), "predicted"),
        Figure(
            "runs in",
            format_bytes(data.smallest_memory_bytes),
            f"of {format_bytes(data.budget_bytes)}, predicted",
        ),
        Figure("peak", format_bytes(data.peak_bytes), "predicted"),
    ]
    if data.step_seconds is not None:
        figures.append(Figure("step", format_seconds(data.step_seconds), "predicted"))
    if data.plan_adds is not None:
        figures.append(Figure("the plan adds", f"{data.plan_adds:.1%}", "predicted"))
    if data.best_size is not None:
        figures.append(Figure("best throughput at", format_count(data.best_size), "predicted"))
    return FirstScreen(
        target=data.subject.target,
        place=data.subject.device,
        verdict=f"The largest {word}{' with a plan' if data.with_plan else ''} is {format_count(data.size)}",
        tone=GOOD,
        sentence=why_no_larger(data),
        figures=tuple(figures),
        description=data.subject.description,
    )


def size_sections(data: SizeData, result: Any, strings: Strings) -> list[Section]:
    """Return throughput over sizes, and everything about the step with the largest."""
    lead = (
        "Sizes that were not captured are worked out from those that were. More samples at once are worth "
        "it as long as the throughput grows."
    )
    step = result.result
    if isinstance(step, Estimate):
        about = page_sections.estimate_sections(estimate_data(step), step, strings)
    else:
        about = page_sections.plan_sections(plan_data(step), step, strings)
    return [Section("sizes", "Throughput over sizes", lead, (_table(data),)), *about]


def _table(data: SizeData) -> Part:
    rows = data.sizes
    columns = [
        column(SIZE_WORDS[data.size_name], "count", [row.size for row in rows]),
        column("step", "seconds", [row.step_seconds for row in rows]),
        column("tokens/s", "large", [row.tokens_per_second for row in rows]),
        column("samples/s", "large", [row.samples_per_second for row in rows]),
        column("runs in", "bytes", [row.smallest_memory_bytes for row in rows]),
        column("peak", "bytes", [row.peak_bytes for row in rows]),
    ]
    if data.with_plan:
        columns.append(column("plan adds", "added", [row.plan_adds for row in rows]))
    columns.append(column("figure", "text", ["captured" if row.captured else "worked out" for row in rows]))
    # What no row has is left out: images have no tokens.
    known = [one for one in columns if any(value is not None for value in one["values"])]
    return table("Sizes up to the largest (predicted)", *known, name="sizes")
