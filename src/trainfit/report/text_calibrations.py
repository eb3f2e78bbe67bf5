"""Calibrations as a person reads them: the speed, where the file is, how real steps compare, all figures."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from trainfit.basics.units import format_bytes, format_seconds
from trainfit.report.amounts import Amount, at_most, stage_times, verdict_alone
from trainfit.report.calibrations import CalibrationData, FigureRow
from trainfit.report.tables import MOST_WARNINGS, NumberTable, safe, stacked


def calibration_view(data: CalibrationData, amount: Amount = "usual") -> RenderableType:
    """Lay out a calibration."""
    if amount == "verdict":
        return verdict_alone(_headline(data), data.warnings)
    return stacked(
        [_headline(data)],
        [_steps_line(data)],
        [_rates(data)],
        [_steps(data)] if data.steps else [],
        [_constants(data)],
        stage_times(data.seconds, amount),
        warnings=data.warnings,
        most_warnings=at_most(MOST_WARNINGS, amount),
        footer=_footer(data),
    )


def _headline(data: CalibrationData) -> Text:
    rates = ", ".join(
        f"{_value(row)} {row.name.removesuffix(' product')}"
        for row in data.figures
        if row.unit in ("FLOP/s", "bytes/s")
    )
    line = safe(data.device, "bold").append(f": {rates} (measured)")
    if data.file is None:
        return line.append(". Nothing was written; -o FILE writes the device file.")
    line.append("; written to ").append_text(safe(data.file, "bold"))
    return line.append_text(safe(f". Use it as --device {data.file}"))


def _steps_line(data: CalibrationData) -> Text:
    span = f"Predictions with it have a range of a factor of {1 + data.uncertainty:.2f}"
    if not data.steps:
        return Text(f"No real step could be run to check the figures. {span}.")
    ratios = [step.ratio for step in data.steps]
    return Text(
        f"{len(ratios)} real steps were predicted with these figures and then run: predicted is "
        f"{min(ratios):.2f} to {max(ratios):.2f} of measured. {span}."
    )


def _rates(data: CalibrationData) -> NumberTable:
    known = any(row.reference for row in data.figures)
    table = NumberTable(
        "fastest (measured)", "per second", "spread", *(("datasheet", "ratio") if known else ())
    )
    for row in data.figures:
        cells = [_value(row), _spread(row)]
        if known:
            cells += _compared(row)
        table.add_row(row.name, *cells)
    return table


def _steps(data: CalibrationData) -> NumberTable:
    table = NumberTable("real steps", "predicted", "measured", "ratio", "spread")
    for step in data.steps:
        table.add_row(
            safe(f"{step.target} {step.options}"),
            format_seconds(step.predicted_seconds),
            format_seconds(step.measured_seconds),
            f"{step.ratio:.2f}",
            f"± {step.spread:.0%}",
        )
    return table


def _constants(data: CalibrationData) -> NumberTable:
    table = NumberTable("constants", "here", "spread", "in general", "ratio")
    for row in data.constants:
        table.add_row(row.name, _value(row), _spread(row), *_compared(row))
    for name in data.undetermined:
        table.add_row(name, "as in general", "-", "-", "-")
    return table


def _compared(row: FigureRow) -> list[str]:
    if row.reference is None or row.ratio is None:
        return ["-", "-"]
    return [written_figure(row.reference, row.unit), f"{row.ratio:.2f}"]


def _value(row: FigureRow) -> str:
    return written_figure(row.value, row.unit)


def _spread(row: FigureRow) -> str:
    return "-" if row.spread is None else f"± {row.spread:.0%}"


def written_figure(value: float, unit: str) -> str:
    """Write a figure with the unit that suits it."""
    if unit == "FLOP/s":
        return f"{value / 1e12:,.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:,.3g} GFLOP/s"
    if unit == "bytes/s":
        return f"{value / 1e9:,.4g} GB/s"
    if unit == "bytes":
        return format_bytes(round(value))
    return format_seconds(value) if unit == "seconds" else f"{value:.3g}"


def _footer(data: CalibrationData) -> str:
    load = "" if data.other_load is None else f", other work took {data.other_load:.0%} of the processors"
    return f"measured in {format_seconds(data.seconds['total'])}{load}, torch {data.torch}"
