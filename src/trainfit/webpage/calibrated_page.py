"""The page of a calibration: what was measured of a device, and how real steps compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainfit.basics.units import format_seconds
from trainfit.report.calibrations import CalibrationData, FigureRow
from trainfit.report.text_calibrations import written_figure
from trainfit.webpage.page_answers import GOOD, PLAIN, Figure, FirstScreen
from trainfit.webpage.page_parts import Part, Section, Strings, bar, bars, column, table

_RATES = ("FLOP/s", "bytes/s")


def calibration_answer(data: CalibrationData) -> FirstScreen:
    """Say how fast the device is, and how good predictions with these figures are."""
    figures = tuple(
        Figure(row.name, written_figure(row.value, row.unit), "measured")
        for row in data.figures
        if row.unit in _RATES
    )
    ratios = [step.ratio for step in data.steps]
    checked = (
        f"{len(ratios)} real steps were predicted with these figures and then run: predicted is "
        f"{min(ratios):.2f} to {max(ratios):.2f} of measured. "
        if ratios
        else "No real step could be run to check the figures. "
    )
    return FirstScreen(
        target="calibration",
        place=data.device,
        verdict="Measured on this machine",
        tone=GOOD if ratios else PLAIN,
        sentence=f"{checked}Predictions with it have a range of a factor of {1 + data.uncertainty:.2f}.",
        figures=figures,
        description="" if data.file is None else f"Written to {data.file}; use it as --device {data.file}",
    )


def calibration_sections(data: CalibrationData, result: Any, strings: Strings) -> list[Section]:
    """Return real steps, rates and constants."""
    found = []
    if data.steps:
        found.append(Section("steps", "Real steps", "", (_bars(data), _steps(data))))
    rates = _figures("The fastest of each (measured)", data.figures, "datasheet")
    constants = _figures("Constants (measured)", data.constants, "in general")
    kept = tuple(f"{name}: as in general" for name in data.undetermined)
    found.append(Section("rates", "Rates", "", (rates,)))
    found.append(Section("constants", "Constants", "", (constants,), kept))
    if data.warnings:
        notes = tuple(dict.fromkeys(data.warnings))
        found.append(Section("notes", "Notes", "", (), notes))
    return found


def _bars(data: CalibrationData) -> Part:
    rows = [
        bar(f"{step.target} {step.options}, {what}", getattr(step, f"{what}_seconds"), what)
        for step in data.steps
        for what in ("predicted", "measured")
    ]
    return bars("Time of a step", "seconds", rows)


def _steps(data: CalibrationData) -> Part:
    steps = data.steps
    return table(
        "Steps as predicted with these figures, and as they ran",
        column("step", "text", [f"{step.target} {step.options}" for step in steps]),
        column("predicted", "seconds", [step.predicted_seconds for step in steps]),
        column("measured", "seconds", [step.measured_seconds for step in steps]),
        column("off by", "added", [step.ratio - 1 for step in steps]),
        column("spread", "share", [step.spread for step in steps]),
        column("runs", "count", [step.runs for step in steps]),
        name="steps",
    )


def _figures(caption: str, rows: Sequence[FigureRow], reference: str) -> Part:
    beside = ["" if row.reference is None else written_figure(row.reference, row.unit) for row in rows]
    return table(
        caption,
        column("figure", "text", [row.name for row in rows]),
        column("here", "text", [written_figure(row.value, row.unit) for row in rows]),
        column("spread", "share", [row.spread for row in rows]),
        column(reference, "text", beside),
        column("of it", "share", [row.ratio for row in rows]),
    )


def calibration_footer(data: CalibrationData) -> str:
    """Say how long it took, and what else ran."""
    load = "" if data.other_load is None else f", other work took {data.other_load:.0%} of the processors"
    return f"measured in {format_seconds(data.seconds['total'])}{load}, torch {data.torch}"
