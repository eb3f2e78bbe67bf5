"""The page of a comparison: which device, where the step fits, how fast it is and what a run costs."""

from __future__ import annotations

from typing import Any

from trainfit.basics.units import format_count, format_seconds
from trainfit.report.compared_data import ComparisonData, DeviceRow
from trainfit.report.text_compared import duration, fits_word, memory_needed, money, price_words
from trainfit.webpage.page_answers import BAD, CLOSE, GOOD, Figure, FirstScreen
from trainfit.webpage.page_parts import Part, Section, Strings, bar, bars, column, table


def comparison_answer(data: ComparisonData) -> FirstScreen:
    """Say which device it should be: the cheapest if there are prices, else the fastest."""
    cheapest, fastest = data.row(data.cheapest), data.row(data.fastest)
    runs, count = sum(row.runs for row in data.devices), len(data.devices)
    figures = [Figure("runs on", f"{runs} of {count}", "devices, predicted")]
    if cheapest is not None:
        figures.append(Figure("cheapest", cheapest.name, price_words(data, cheapest)))
    if fastest is not None:
        figures.append(
            Figure("fastest", fastest.name, f"{format_seconds(fastest.step_seconds or 0.0)} per step")
        )
    best = cheapest or fastest
    if not runs:
        verdict, tone = "Fits on none of them", BAD
        sentence = "The step fits on none of these devices, with or without a plan (predicted)."
    elif best is None:
        verdict, tone = f"Runs on {runs} of {count}", GOOD
        sentence = (
            "Nothing is known about the speed of these devices, so none of them can be said to be best."
        )
    else:
        among = " of those with a price" if data.without_price else ""
        verdict = f"Cheapest on {best.name}{among}" if cheapest is not None else f"Fastest on {best.name}"
        tone, sentence = GOOD if best.fits else CLOSE, _reason(data, best)
    return FirstScreen(
        target=data.target,
        place=f"{format_count(count)} device{'' if count == 1 else 's'}",
        verdict=verdict,
        tone=tone,
        sentence=sentence,
        figures=tuple(figures),
        description=data.description,
    )


def _reason(data: ComparisonData, best: DeviceRow) -> str:
    if best.fits:
        how = "The step fits as it is"
    elif best.runs:
        how = f"The step fits with a plan, which adds {best.plan_added_share or 0.0:.1%}"
    else:
        how = "Whether the step fits is too close to call"
    text = how if best.step_seconds is None else f"{how} and takes {format_seconds(best.step_seconds)}"
    if best.run_seconds is not None and data.run is not None:
        text += f"; a run of {data.run.words} takes {duration(best.run_seconds)}"
        text += f" and costs {money(best.cost)}" if best.cost is not None else ""
    without = data.without_price
    said = f" Without a price: {', '.join(without)}." if without else ""
    return f"{text} (predicted).{said}"


def comparison_sections(data: ComparisonData, result: Any, strings: Strings) -> list[Section]:
    """Return pictures that answer which device, the table with all figures, and the notes."""
    lead = (
        "What a step needs of the memory that each device has for tensors; times and costs are those with "
        "the plan, where one is needed."
    )
    pictures = [_memory(data), *_times(data), *_costs(data)]
    found = [
        Section("which", "Which device", lead, tuple(pictures)),
        Section("devices", "All figures", _prices_are_yours(data), (_fits(data), *_runs(data))),
    ]
    notes = tuple(dict.fromkeys(data.warnings))
    return [*found, Section("notes", "Notes", "", (), notes)] if notes else found


def _prices_are_yours(data: ComparisonData) -> str:
    priced = any(row.price_per_hour is not None for row in data.devices)
    return "Prices are those that were given, per hour and device." if priced else ""


def _label(row: DeviceRow) -> str:
    word = fits_word(row)
    return row.name if word == "yes" else f"{row.name} ({'does not fit' if word == 'no' else word})"


def _memory(data: ComparisonData) -> Part:
    """Return how much of each device a step takes; what does not fit is more than the device has."""
    rows = []
    for row in data.devices:
        share = memory_needed(row) / max(row.usable_bytes, 1)
        style = "over" if not row.runs else "best" if row.name == (data.cheapest or data.fastest) else "other"
        rows.append(bar(_label(row), share, style))
    return bars("Share of the device's memory that a step needs (predicted)", "share", rows)


def _times(data: ComparisonData) -> list[Part]:
    rows = [
        bar(row.name, row.step_seconds, "best" if row.name == data.fastest else "other")
        for row in data.devices
        if row.step_seconds is not None
    ]
    return [bars("Time of a step (predicted)", "seconds", rows)] if rows else []


def _costs(data: ComparisonData) -> list[Part]:
    """Return what the run costs, or else a million tokens or samples."""
    about = data.run.words if data.run is not None else ""
    candidates = (
        (f"Cost of {about} (predicted)", [row.cost for row in data.devices]),
        ("Cost of a million tokens (predicted)", [row.cost_per_million_tokens for row in data.devices]),
        ("Cost of a million samples (predicted)", [row.cost_per_million_samples for row in data.devices]),
    )
    for caption, costs in candidates:
        known = [(row.name, cost) for row, cost in zip(data.devices, costs) if cost is not None]
        if known:
            rows = [bar(name, cost, "best" if name == data.cheapest else "other") for name, cost in known]
            return [bars(caption, "money", rows)]
    return []


def _fits(data: ComparisonData) -> Part:
    rows = data.devices
    return _known(
        "Where it fits, and how fast it is (predicted)",
        "fits",
        column("device", "text", [row.name for row in rows]),
        column("fits", "text", [fits_word(row) for row in rows]),
        column("runs in", "bytes", [memory_needed(row) for row in rows], "The least memory"),
        column("has", "bytes", [row.usable_bytes for row in rows], "What the device has for tensors"),
        column("plan adds", "added", [row.plan_added_share for row in rows]),
        column("step", "seconds", [row.step_seconds for row in rows]),
        column("at least", "seconds", [row.lower_seconds for row in rows], "Of five steps, four", minor=True),
        column("at most", "seconds", [row.upper_seconds for row in rows], "Of five steps, four", minor=True),
        column("tokens/s", "large", [row.tokens_per_second for row in rows]),
        column("samples/s", "large", [row.samples_per_second for row in rows], minor=True),
    )


def _runs(data: ComparisonData) -> list[Part]:
    """Return what a run takes and costs, as far as that was asked."""
    rows = data.devices
    if data.run is None and all(row.price_per_hour is None for row in rows):
        return []
    found = _known(
        "What a run takes and costs (predicted)",
        "runs",
        column("device", "text", [row.name for row in rows]),
        column("run", "figure", [row.run_seconds and duration(row.run_seconds) for row in rows]),
        column("cost", "money", [row.cost for row in rows]),
        column("at least", "money", [row.cost_lower for row in rows], "Four of five runs", minor=True),
        column("at most", "money", [row.cost_upper for row in rows], "Four of five runs", minor=True),
        column("per epoch", "money", [row.cost_per_epoch for row in rows]),
        column("per 1M tokens", "money", [row.cost_per_million_tokens for row in rows], minor=True),
        column("per 1M samples", "money", [row.cost_per_million_samples for row in rows], minor=True),
        column("per hour", "money", [row.price_per_hour for row in rows], "The price that was given"),
    )
    return [found]


def _known(caption: str, name: str, *columns: dict[str, Any]) -> Part:
    """Return a table without the columns in which no device has a figure."""
    known = [one for one in columns if any(value is not None for value in one["values"])]
    return table(caption, *known, name=name)


def comparison_footer(data: ComparisonData) -> str:
    """Say what was done for it."""
    took = format_seconds(data.seconds.get("total", 0.0))
    return f"{format_count(data.ops)} ops on {len(data.devices)} devices, found in {took}, torch {data.torch}"
