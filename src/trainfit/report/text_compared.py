"""One step on several devices as a person reads it: the cheapest, the fastest, then each of them."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.report.amounts import Amount, at_most, stage_times, verdict_alone
from trainfit.report.compared_data import ComparisonData, DeviceRow
from trainfit.report.tables import MOST_WARNINGS, Cell, NumberTable, safe, stacked

_WHOLE_ABOVE = 100
_DAY = 24 * 3600
_NOTHING = Text("-", "dim")


def comparison_view(data: ComparisonData, amount: Amount = "usual") -> RenderableType:
    """Lay out a comparison: the answer, where it fits and how fast it is, what a run takes and costs."""
    if amount == "verdict":
        return verdict_alone(_compared_headline(data), data.warnings)
    described = [safe(data.description, "dim")] if data.description else []
    return stacked(
        [_compared_headline(data), *described, *_cluster(data)],
        [_fits(data)],
        [_runs(data)],
        stage_times(data.seconds, amount),
        warnings=data.warnings,
        most_warnings=at_most(MOST_WARNINGS, amount),
        footer=_compared_footer(data),
    )


def _compared_headline(data: ComparisonData) -> Text:
    count = sum(row.runs for row in data.devices)
    line = Text().append_text(safe(data.target, "bold")).append(": ")
    if not count:
        return line.append(f"fits on none of {_devices(len(data.devices))} (predicted)", "bold red")
    line.append(f"runs on {count} of {_devices(len(data.devices))} (predicted)")
    cheapest, fastest = data.row(data.cheapest), data.row(data.fastest)
    if cheapest is not None:
        line.append(", cheapest on ").append_text(safe(cheapest.name, "bold green"))
        line.append(" of those with a price" if data.without_price else "")
        line.append(f" ({words})" if (words := price_words(data, cheapest)) else "")
    if fastest is not None:
        line.append(", fastest on ").append_text(safe(fastest.name, "bold green"))
        line.append(f" ({format_seconds(fastest.step_seconds or 0.0)} per step)")
    return line


def _devices(count: int) -> str:
    return f"{count} device{'' if count == 1 else 's'}"


def price_words(data: ComparisonData, row: DeviceRow) -> str:
    """Say what the run costs on a device, or else a million tokens or samples; empty without a price."""
    if row.cost is not None and data.run is not None:
        return f"{money(row.cost)} for {data.run.words}"
    if row.cost_per_million_tokens is not None:
        return f"{money(row.cost_per_million_tokens)} per million tokens"
    if row.cost_per_million_samples is not None:
        return f"{money(row.cost_per_million_samples)} per million samples"
    return ""


def _cluster(data: ComparisonData) -> list[Text]:
    if data.world_size == 1:
        return []
    mesh = ", ".join(f"{name}={size}" for name, size in data.mesh.items())
    copies = f"{format_count(data.copies)} cop{'y' if data.copies == 1 else 'ies'} of the model"
    shape = f" ({mesh})" if mesh else ""
    return [safe(f"On {format_count(data.world_size)} devices of each kind{shape}, {copies}.")]


def _fits(data: ComparisonData) -> NumberTable:
    table = NumberTable("device", "fits", "step", "likely", "runs in", "adds")
    for row in data.devices:
        table.add_row(
            safe(row.name),
            _fits_cell(row),
            _seconds(row.step_seconds),
            _span(row.lower_seconds, row.upper_seconds),
            format_bytes(memory_needed(row)),
            _NOTHING if row.plan_added_share is None else f"{row.plan_added_share:+.1%}",
        )
    return table


def memory_needed(row: DeviceRow) -> int:
    """Return the memory with which it runs: under the plan, if one is needed and found."""
    planned = row.plan_memory_bytes if row.plan == "needed" else None
    return row.smallest_memory_bytes if planned is None else planned


_STYLES = {"yes": "green", "with plan": "green", "close": "yellow", "no": "red"}


def fits_word(row: DeviceRow) -> str:
    """Say whether it fits."""
    if row.fits:
        return "yes"
    if row.runs:
        return "with plan"
    return "close" if row.plan == "not looked for" and row.verdict == "too close to call" else "no"


def _fits_cell(row: DeviceRow) -> Text:
    word = fits_word(row)
    return Text(word, _STYLES[word])


def _runs(data: ComparisonData) -> NumberTable:
    """Lay out throughput, and what a run takes and costs as far as that was asked."""
    by_tokens = any(row.tokens_per_second is not None for row in data.devices)
    columns = ["tokens/s" if by_tokens else "samples/s"]
    priced = any(row.price_per_hour is not None for row in data.devices)
    per_epoch = any(row.cost_per_epoch is not None for row in data.devices)
    columns += ["run"] if data.run is not None else []
    costs_run = priced and data.run is not None
    unit = "per epoch" if per_epoch else f"per 1M {'tokens' if by_tokens else 'samples'}"
    # Where it is narrow, the last columns are left out.
    columns += [*(["cost"] if costs_run else []), *([unit] if priced else [])]
    columns += [*(["likely cost"] if costs_run else []), *(["per hour"] if priced else [])]
    table = NumberTable("device", *columns)
    for row in data.devices:
        per_million = row.cost_per_million_tokens if by_tokens else row.cost_per_million_samples
        cells: list[Cell] = [_rate(row.tokens_per_second if by_tokens else row.samples_per_second)]
        cells += [_NOTHING if row.run_seconds is None else duration(row.run_seconds)] if data.run else []
        cells += [_money(row.cost)] if costs_run else []
        cells += [_money(row.cost_per_epoch if per_epoch else per_million)] if priced else []
        cells += [_money_span(row.cost_lower, row.cost_upper)] if costs_run else []
        cells += [_money(row.price_per_hour)] if priced else []
        table.add_row(safe(row.name), *cells)
    return table


def _rate(value: float | None) -> Cell:
    if value is None:
        return _NOTHING
    return format_count(round(value)) if value >= _WHOLE_ABOVE else f"{value:.3g}"


def _seconds(value: float | None) -> Cell:
    return _NOTHING if value is None else format_seconds(value)


def _span(lower: float | None, upper: float | None) -> Cell:
    if lower is None or upper is None:
        return _NOTHING
    return f"{format_seconds(lower)} to {format_seconds(upper)}"


def duration(seconds: float) -> str:
    """Write the length of a run: days where it has some."""
    return f"{seconds / _DAY:,.1f} days" if seconds >= 2 * _DAY else format_seconds(seconds)


def money(amount: float) -> str:
    """Write an amount without a currency: two decimals, or three digits where that is too few."""
    return f"{amount:,.2f}" if amount >= 0.995 or amount == 0 else f"{amount:.3g}"


def _money(amount: float | None) -> Cell:
    return _NOTHING if amount is None else money(amount)


def _money_span(lower: float | None, upper: float | None) -> Cell:
    return _NOTHING if lower is None or upper is None else f"{money(lower)} to {money(upper)}"


def _compared_footer(data: ComparisonData) -> str:
    parts = []
    if data.run is not None:
        parts.append(f"run: {data.run.words}, {format_count(data.run.steps)} steps")
    if any(row.plan == "needed" for row in data.devices):
        parts.append("where a plan is needed, times and costs are those with it, and adds is what it adds")
    taken = f"{format_count(data.ops)} ops, captured {_times(data.captures)}"
    return f"{'; '.join([*parts, taken])}, torch {data.torch}"


def _times(count: int) -> str:
    return "before" if not count else "once" if count == 1 else f"{count} times"
