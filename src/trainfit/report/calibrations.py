"""What a reader sees of a calibration, as plain data: its fields are the keys of its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainfit.devices.device_file import device_json

if TYPE_CHECKING:
    from trainfit.calibrating.calibration_result import CalibrationResult, MeasuredFigure


@dataclass(frozen=True)
class FigureRow:
    """A measured figure beside what it is compared with."""

    name: str
    value: float
    unit: str
    spread: float | None
    reference: float | None
    """The datasheet's figure, or the constant that holds in general."""
    ratio: float | None
    """Measured by reference."""


@dataclass(frozen=True)
class StepRow:
    """A step as predicted with the measured figures, and as it ran."""

    target: str
    options: str
    predicted_seconds: float
    measured_seconds: float
    ratio: float
    """Predicted by measured."""
    spread: float
    runs: int


@dataclass(frozen=True)
class CalibrationData:
    """A calibration: the rates, the constants, real steps beside their predictions, the device file."""

    device: str
    torch: str
    seconds: dict[str, float]
    warnings: tuple[str, ...]
    kind: str
    file: str | None
    """Where the device file was written."""
    figures: tuple[FigureRow, ...]
    constants: tuple[FigureRow, ...]
    undetermined: tuple[str, ...]
    """Constants that keep their general value."""
    steps: tuple[StepRow, ...]
    uncertainty: float
    """The range that predictions with these figures get, as a share."""
    other_load: float | None
    device_file: dict[str, Any]
    """The content of the file."""


def calibration_data(result: CalibrationResult, file: str | None) -> CalibrationData:
    """Return what a reader sees of a calibration that was written to `file`, if it was."""
    return CalibrationData(
        device=result.device.name,
        torch=result.torch,
        seconds=result.seconds,
        warnings=result.warnings,
        kind=result.device.kind,
        file=file,
        figures=tuple(map(_row, result.figures)),
        constants=tuple(map(_row, result.constants)),
        undetermined=result.undetermined,
        steps=tuple(
            StepRow(
                step.target,
                step.options,
                step.predicted_seconds,
                step.measured_seconds,
                step.ratio,
                step.spread,
                step.runs,
            )
            for step in result.steps
        ),
        uncertainty=result.device.constants["uncertainty"],
        other_load=result.other_load,
        device_file=device_json(result.device),
    )


def _row(figure: MeasuredFigure) -> FigureRow:
    return FigureRow(figure.name, figure.value, figure.unit, figure.spread, figure.reference, figure.ratio)
