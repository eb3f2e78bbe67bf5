"""Verifications as a person reads them: how far off the prediction was, and whether results are the same."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from trainfit.plan_origin import other_step
from trainfit.report.tables import NumberTable, percent, safe, settings_lines, warning_lines
from trainfit.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from trainfit.verification import Comparison, Verification

_MOST_DIFFERENCES = 5


def verification_view(verification: Verification) -> RenderableType:
    """Lay out a verification: how far off the prediction was, and the figures side by side."""
    predicted, measured = verification.predicted_peak_bytes, verification.measured
    if measured.compiled:
        table, compare = NumberTable("", "eager, predicted", "compiled, measured", "ratio"), _ratio
    else:
        table, compare = NumberTable("", "predicted", "measured", "error"), _error
    of_another = bool(verification.plan_differences)
    table.add_row(
        "peak",
        *_both(predicted, measured.peak_bytes),
        _other_step() if of_another else compare(predicted, measured.peak_bytes),
    )
    table.add_row(
        "before the step",
        *_both(verification.predicted_persistent_bytes, measured.persistent_bytes),
        compare(verification.predicted_persistent_bytes, measured.persistent_bytes),
    )
    ratio = verification.predicted_seconds / measured.seconds if measured.seconds else 1.0
    time_error = Text(f"{ratio:.2f} x" if measured.compiled else f"{ratio - 1:+.1%}")
    table.add_row(
        "step time",
        Text(format_seconds(verification.predicted_seconds)),
        Text(format_seconds(measured.seconds)),
        _other_step() if of_another else time_error,
    )
    comparison = verification.comparison
    if comparison is not None:
        baseline = comparison.baseline
        table.add_row("peak without the plan", "", format_bytes(baseline.peak_bytes), "")
        table.add_row("step time without the plan", "", format_seconds(baseline.seconds), "")
    seconds = verification.seconds
    footer = Text(
        f"predicted in {format_seconds(seconds['capture'])} from {format_count(len(verification.trace.ops))} "
        f"ops, measured in {format_seconds(seconds['measure'])} ({_times(verification.runs['total'])} of the "
        f"step), torch {verification.trace.torch}",
        "dim",
    )
    parts = [
        _verdict(verification),
        *settings_lines(verification.trace),
        *([safe(other, "yellow")] if (other := other_step(verification.plan_differences)) else []),
        *([] if comparison is None else _same_results(comparison)),
        Text(),
        table,
        *warning_lines(verification.warnings),
        Text(),
        footer,
    ]
    return Group(*parts)


def _verdict(verification: Verification) -> Text:
    line = safe(verification.target, "bold").append(f" on {verification.device.name}: ")
    if verification.measured.compiled:
        return line.append_text(_compiled_verdict(verification))
    if verification.plan_differences:
        return line.append_text(_other_plan_verdict(verification))
    line.append("the predicted peak is ")
    if verification.predicted_peak_bytes == verification.measured.peak_bytes:
        return line.append("exact", "bold green").append(
            f" ({format_count(verification.measured.peak_bytes)} bytes)"
        )
    direction = "high" if verification.error > 0 else "low"
    difference = abs(verification.predicted_peak_bytes - verification.measured.peak_bytes)
    line.append(f"{percent(abs(verification.error))} too {direction}", "bold yellow")
    return line.append(f" ({format_count(difference)} bytes)")


def _compiled_verdict(verification: Verification) -> Text:
    """Say both peaks: that of a compiled step is nobody's prediction."""
    predicted, measured = verification.predicted_peak_bytes, verification.measured.peak_bytes
    line = Text("the step is compiled and has a peak of ")
    line.append(format_bytes(measured), "bold").append(" (measured); the eager step has ")
    line.append(format_bytes(predicted), "bold")
    line.append(f" (predicted), {predicted / max(measured, 1):.2f} times that. ")
    return line.append("--eager measures the eager step.")


def _other_plan_verdict(verification: Verification) -> Text:
    """Say what was measured: what the plan promises is about another step, be it the same number or not."""
    line = Text("the plan was made for another step. With it this one has a peak of ")
    line.append(format_bytes(verification.measured.peak_bytes), "bold").append(" (measured)")
    if verification.comparison is not None:
        line.append(f", without it {format_bytes(verification.comparison.baseline.peak_bytes)}")
    return line.append(f"; it promises {format_bytes(verification.predicted_peak_bytes)} for its own")


def _other_step() -> Text:
    return Text("other step", "yellow")


def _same_results(comparison: Comparison) -> list[RenderableType]:
    """Say whether the plan changed the results, where, and what was not compared."""
    results = comparison.results
    line = Text("With the plan the loss is ").append_text(_equality(comparison.loss_equal))
    line.append(", the gradients are ").append_text(_equality(comparison.gradients_equal))
    line.append(", parameters and buffers afterwards are ").append_text(_equality(comparison.state_equal))
    line.append(" (bit by bit, measured).")
    if comparison.gradients_equal is False and math.isfinite(comparison.max_gradient_difference):
        relative = comparison.max_gradient_difference / (results.gradient_scale or 1.0)
        line.append(f" Gradients are up to {relative:.1e} of the largest apart.")
    parts: list[RenderableType] = [line]
    for title, lines in (("not equal", results.differences), ("not compared", results.not_compared)):
        parts += [Padding(safe(f"{title}: {text}"), (0, 0, 0, 2)) for text in lines[:_MOST_DIFFERENCES]]
        if len(lines) > _MOST_DIFFERENCES:
            parts.append(Text(f"  and {len(lines) - _MOST_DIFFERENCES} more; --json lists all", "dim"))
    return parts


def _equality(equal: bool | None) -> Text:
    if equal is None:
        return Text("not compared", "yellow")
    return Text("equal", "green") if equal else Text("NOT equal", "bold red")


def _both(predicted: int, measured: int) -> tuple[Text, Text]:
    return Text(format_bytes(predicted)), Text(format_bytes(measured))


def _times(runs: int) -> str:
    return "1 run" if runs == 1 else f"{runs} runs"


def _ratio(predicted: int, measured: int) -> Text:
    return Text(f"{predicted / measured:.2f} x" if measured else "-")


def _error(predicted: int, measured: int) -> Text:
    if predicted == measured:
        return Text("exact", "green")
    if measured == 0:
        return Text(f"+{format_count(predicted)} B", "yellow")
    error = (predicted - measured) / measured
    return Text(f"{'+' if error > 0 else '-'}{percent(abs(error))}", "yellow")
