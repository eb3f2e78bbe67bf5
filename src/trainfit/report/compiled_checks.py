"""What a reader sees of a compiled step that was run: as data, and laid out for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from trainfit.basics.units import format_bytes, format_seconds
from trainfit.report.amounts import Amount, at_most, stage_times, verdict_alone
from trainfit.report.data import Compared, Subject
from trainfit.report.reading import subject_of
from trainfit.report.tables import MOST_WARNINGS, NumberTable, percent, safe, settings_lines, stacked

if TYPE_CHECKING:
    from trainfit.verifying.compiled_verification import CompiledVerification


@dataclass(frozen=True)
class CompiledVerificationData:
    """A compiled step: predicted against measured, and beside what it was compared with."""

    subject: Subject
    backend: str
    peak_bytes: Compared[int]
    error: float
    seconds: Compared[float]
    budget_bytes: int | None
    within_budget: bool | None
    baseline_measured_peak_bytes: int
    """Of the compiled step without the plan; if there is none, of the measured step."""
    baseline_measured_seconds: float
    activation_memory_budget: float | None
    """Torch's fraction that comes nearest to the plan's peak, as predicted."""
    fraction_measured_peak_bytes: int | None
    fraction_measured_seconds: float | None
    loss_equal: bool | None
    gradients_equal: bool | None
    planned_float64_error: float | None
    """Of the gradients with the plan to a float64 run, as a share of the largest; None if equal."""
    unplanned_float64_error: float | None
    float64_failure: str | None
    """The error with which the step does not run in float64, if that was tried."""
    results_hold: bool | None


def compiled_verification_data(found: CompiledVerification) -> CompiledVerificationData:
    """Return what a reader sees of a compiled step that was run."""
    baseline, budget = found.baseline or found.measured, found.plan.budget_bytes if found.plan else None
    torchs, results = found.with_fraction, found.results
    return CompiledVerificationData(
        subject=subject_of(found.trace, found.device, found.seconds, found.warnings),
        backend=found.backend,
        peak_bytes=Compared(found.predicted_peak_bytes, found.measured.peak_bytes),
        error=found.error,
        seconds=Compared(found.predicted_seconds, found.measured.seconds),
        budget_bytes=budget,
        within_budget=None if budget is None else found.measured.peak_bytes <= budget,
        baseline_measured_peak_bytes=baseline.peak_bytes,
        baseline_measured_seconds=baseline.seconds,
        activation_memory_budget=found.fraction,
        fraction_measured_peak_bytes=torchs.peak_bytes if torchs else None,
        fraction_measured_seconds=torchs.seconds if torchs else None,
        loss_equal=results.same.loss.equal if results else None,
        gradients_equal=results.same.gradients.equal if results else None,
        planned_float64_error=results.planned_error if results else None,
        unplanned_float64_error=results.unplanned_error if results else None,
        float64_failure=(results.why_no_reference or None) if results else None,
        results_hold=results.hold if results else None,
    )


def compiled_verification_view(data: CompiledVerificationData, amount: Amount = "usual") -> RenderableType:
    """Lay out the verdict, whether results are the same, and all runs side by side."""
    if amount == "verdict":
        return verdict_alone(_verdict(data), data.subject.warnings)
    planned = data.budget_bytes is not None
    table = NumberTable(f"compiled by {data.backend}", "peak", "step", least=("step", "peak"))
    peak, seconds = data.peak_bytes, data.seconds
    what = "with the plan" if planned else "the step"
    rows = [
        (f"{what}, predicted", peak.predicted, seconds.predicted),
        (f"{what}, measured", peak.measured, seconds.measured),
    ]
    if planned:
        rows.append(
            ("without a plan, measured", data.baseline_measured_peak_bytes, data.baseline_measured_seconds)
        )
    if data.fraction_measured_peak_bytes is not None and data.fraction_measured_seconds is not None:
        name = f"activation_memory_budget {data.activation_memory_budget}, measured"
        rows.append((name, data.fraction_measured_peak_bytes, data.fraction_measured_seconds))
    for name, size, time in rows:
        table.add_row(name, format_bytes(size), format_seconds(time))
    return stacked(
        [_verdict(data), *settings_lines(data.subject), *([_results(data)] if planned else [])],
        [table],
        stage_times(data.subject.seconds, amount),
        warnings=data.subject.warnings,
        most_warnings=at_most(MOST_WARNINGS, amount),
        footer=f"torch {data.subject.torch}",
    )


def _verdict(data: CompiledVerificationData) -> Text:
    line = safe(data.subject.target, "bold").append(f" on {data.subject.device}: the predicted peak is ")
    if data.peak_bytes.exact:
        line.append("exact", "bold green")
    else:
        direction = "high" if data.error > 0 else "low"
        line.append(f"{percent(abs(data.error))} too {direction}", "bold yellow")
    if data.budget_bytes is None:
        return line
    size = format_bytes(data.budget_bytes)
    if data.within_budget:
        return line.append("; measured, it is ").append(f"within {size}", "bold green")
    return line.append("; measured, it is ").append(f"ABOVE {size}", "bold red")


def _results(data: CompiledVerificationData) -> Text:
    if data.loss_equal and data.gradients_equal:
        return Text("Loss and gradients are equal bit by bit with and without the plan.", "green")
    if data.results_hold is None:
        why = "Loss and gradients are not equal bit by bit, and the step does not run in float64"
        return safe(f"{why} ({data.float64_failure})." if data.float64_failure else f"{why}.", "yellow")
    errors = data.planned_float64_error or 0.0, data.unplanned_float64_error or 0.0
    text = (
        f"Gradients are {errors[0]:.1e} from those in float64 with the plan, {errors[1]:.1e} without it, as "
        "a share of the largest."
    )
    return Text(text, "green" if data.results_hold else "bold red")
