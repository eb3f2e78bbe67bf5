"""Verifications as a person reads them: how far off the prediction was, and whether results are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.plans.plan_origin import other_step
from trainfit.report.amounts import Amount, at_most, stage_times, verdict_alone
from trainfit.report.data import Compared, VerificationData
from trainfit.report.tables import (
    MOST_WARNINGS,
    NumberTable,
    indented,
    percent,
    safe,
    settings_lines,
    stacked,
)
from trainfit.report.way_checked import rounding_words

if TYPE_CHECKING:
    from trainfit.report.rank_report import RankVerificationData

MOST_DIFFERENCES = 5
_EAGER = ("predicted", "measured")
_COMPILED = ("eager, predicted", "compiled, measured")
_EQUALITY = {True: ("equal", "green"), False: ("NOT equal", "bold red"), None: ("not compared", "yellow")}


def verification_view(data: VerificationData, amount: Amount = "usual") -> RenderableType:
    """Lay out a verification: how far off the prediction was, and the figures side by side."""
    if amount == "verdict":
        return verdict_alone(_verdict(data), data.subject.warnings)
    subject, runs = data.subject, data.runs["total"]
    footer = (
        f"predicted in {format_seconds(subject.seconds['capture'])} from {format_count(subject.ops)} "
        f"ops, measured in {format_seconds(subject.seconds['measure'])} "
        f"({runs} run{'' if runs == 1 else 's'} of the step), torch {subject.torch}"
    )
    results = _same_results(data, at_most(MOST_DIFFERENCES, amount)) if data.ran_with else []
    return verification_page(_verdict(data), data, results, _figures(data), footer=footer, amount=amount)


def verification_page(
    verdict: Text,
    data: VerificationData | RankVerificationData,
    results: list[RenderableType],
    figures: NumberTable,
    *,
    footer: str,
    amount: Amount,
    replayed: bool = False,
) -> RenderableType:
    """Put the verdict first, then what the step is, whether the plan is of another one, results, figures."""
    other = other_step(data.plan_differences, replayed=replayed)
    answer = [
        verdict,
        *settings_lines(data.subject),
        *([safe(other, "yellow")] if other else []),
        *results,
    ]
    return stacked(
        answer,
        [figures],
        stage_times(data.subject.seconds, amount),
        warnings=data.subject.warnings,
        footer=footer,
        most_warnings=at_most(MOST_WARNINGS, amount),
    )


def _figures(data: VerificationData) -> NumberTable:
    if data.compiled:
        table, compare = NumberTable("", *_COMPILED, "ratio", least=_COMPILED), _ratio
    else:
        table, compare = NumberTable("", *_EAGER, "error", least=_EAGER), error_cell
    peak, before, seconds = data.peak_bytes, data.persistent_bytes, data.seconds
    peak_error, ratio = compare(peak), 1.0 if seconds.ratio is None else seconds.ratio
    time_error = Text(f"{ratio:.2f} x" if data.compiled else f"{ratio - 1:+.1%}")
    if data.plan_differences:
        peak_error = time_error = Text("other step", "yellow")
    table.add_row("peak", format_bytes(peak.predicted), format_bytes(peak.measured), peak_error)
    table.add_row(
        "before the step", format_bytes(before.predicted), format_bytes(before.measured), compare(before)
    )
    table.add_row(
        "step time", format_seconds(seconds.predicted), format_seconds(seconds.measured), time_error
    )
    if data.way is not None and data.way.device == data.subject.device:
        table.add_row("peak, promised by the way", format_bytes(data.way.promised_peak_bytes), "", "")
    if data.ran_with:
        without = f"without {data.ran_with}"
        table.add_row(f"peak {without}", "", format_bytes(data.baseline_measured_peak_bytes), "")
        table.add_row(f"step time {without}", "", format_seconds(data.baseline_measured_seconds), "")
    return table


def _verdict(data: VerificationData) -> Text:
    peak = data.peak_bytes
    line = safe(data.subject.target, "bold").append(f" on {data.subject.device}: ")
    if data.compiled:
        return line.append_text(_compiled_verdict(peak))
    if data.plan_differences:
        return line.append_text(_other_plan_verdict(data))
    line.append("the predicted peak is ")
    if peak.exact:
        return line.append("exact", "bold green").append(f" ({format_count(peak.measured)} bytes)")
    direction = "high" if data.error > 0 else "low"
    line.append(f"{percent(abs(data.error))} too {direction}", "bold yellow")
    return line.append(f" ({format_count(abs(peak.predicted - peak.measured))} bytes)")


def _compiled_verdict(peak: Compared[int]) -> Text:
    """Say both peaks: that of a compiled step is nobody's prediction."""
    line = Text("the step is compiled and has a peak of ")
    line.append(format_bytes(peak.measured), "bold").append(" (measured); the eager step has ")
    line.append(format_bytes(peak.predicted), "bold")
    line.append(f" (predicted), {peak.predicted / max(peak.measured, 1):.2f} times that. ")
    return line.append("--eager measures the eager step.")


def _other_plan_verdict(data: VerificationData) -> Text:
    """Say what was measured: what the plan promises is about another step, be it the same number or not."""
    line = Text("the plan was made for another step. With it this one has a peak of ")
    line.append(format_bytes(data.peak_bytes.measured), "bold").append(" (measured)")
    if data.plan_made_for is not None:
        line.append(f", without it {format_bytes(data.baseline_measured_peak_bytes)}")
    return line.append(f"; it promises {format_bytes(data.peak_bytes.predicted)} for its own")


def _same_results(data: VerificationData, most: int) -> list[RenderableType]:
    """Say whether the plan or the way changed the results, where, and what was not compared."""
    way, unclear = data.way, indented([f"not compared: {text}" for text in data.not_compared], most)
    if way is not None and way.by_rounding:
        line = Text(rounding_words(way), "" if way.results_hold else "bold red")
        return [line, *unclear]
    if way is not None and way.tolerance is None:
        return [Text("With the way results are not compared (measured).", "yellow"), *unclear]
    line = equality_line(f"With {data.ran_with}", data)
    if data.gradients_equal is False and data.relative_gradient_difference is not None:
        line.append(f" Gradients are up to {data.relative_gradient_difference:.1e} of the largest apart.")
    return [
        line,
        *indented([f"not equal: {text}" for text in data.differences], most),
        *unclear,
    ]


def equality_line(where: str, data: VerificationData | RankVerificationData) -> Text:
    """Say which results are the same as without the plan."""
    line = Text(f"{where} the loss is ").append(*_EQUALITY[data.loss_equal])
    line.append(", the gradients are ").append(*_EQUALITY[data.gradients_equal])
    line.append(", parameters and buffers afterwards are ").append(*_EQUALITY[data.state_equal])
    return line.append(" (bit by bit, measured).")


def _ratio(figure: Compared[int]) -> Text:
    return Text("-" if figure.ratio is None else f"{figure.ratio:.2f} x")


def error_cell(figure: Compared[int]) -> Text:
    """Say how far off a figure is."""
    if figure.exact:
        return Text("exact", "green")
    if figure.error is None:
        return Text(f"+{format_count(figure.predicted)} B", "yellow")
    return Text(f"{'+' if figure.error > 0 else '-'}{percent(abs(figure.error))}", "yellow")
