"""What a reader sees of a verification of several ranks, as plain data and as a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.report.amounts import Amount, at_most, verdict_alone
from trainfit.report.data import Compared, Subject
from trainfit.report.reading import subject_of
from trainfit.report.tables import NumberTable, indented, percent, safe
from trainfit.report.text_verification import MOST_DIFFERENCES, equality_line, error_cell, verification_page
from trainfit.traces.settings import Difference, settings_json
from trainfit.traces.trace import PHASES

if TYPE_CHECKING:
    from trainfit.verifying.rank_verification import RankFound, RankVerification


@dataclass(frozen=True)
class RankData:
    """One rank: predicted against measured; with a plan, its decisions on the step of this rank."""

    rank: int
    peak_bytes: Compared[int]
    error: float
    persistent_bytes: Compared[int]
    forward_bytes: Compared[Any]
    backward_bytes: Compared[Any]
    optimizer_bytes: Compared[Any]
    baseline_measured_peak_bytes: int
    """Of the step without the plan; if there is none, of the measured step."""
    runs: int
    loss_equal: bool | None
    gradients_equal: bool | None
    state_equal: bool | None
    differences: tuple[str, ...]
    not_compared: tuple[str, ...]


@dataclass(frozen=True)
class RankVerificationData:
    """All ranks. The peak is that of the rank that needs the most, the error that of the worst prediction."""

    subject: Subject
    world_size: int
    peak_bytes: Compared[int]
    error: float
    plan_made_for: dict[str, Any] | None
    plan_differences: tuple[Difference, ...]
    loss_equal: bool | None
    gradients_equal: bool | None
    state_equal: bool | None
    ranks: tuple[RankData, ...]


def rank_verification_data(found: RankVerification) -> RankVerificationData:
    """Return what a reader sees of a verification of several ranks."""
    worst, plan = found.worst, found.plan
    return RankVerificationData(
        subject=subject_of(found.trace, found.device, found.seconds, found.warnings),
        world_size=len(found.ranks),
        peak_bytes=Compared(worst.predicted.peak_bytes, worst.measured.peak_bytes),
        error=found.largest_error,
        plan_made_for={"device": plan.device, **settings_json(plan.settings)} if plan else None,
        plan_differences=found.plan_differences,
        loss_equal=_all_equal([rank.loss_equal for rank in found.ranks]),
        gradients_equal=_all_equal([rank.gradients_equal for rank in found.ranks]),
        state_equal=_all_equal([rank.state_equal for rank in found.ranks]),
        ranks=tuple(map(_rank_data, found.ranks)),
    )


def _rank_data(found: RankFound) -> RankData:
    predicted, measured = found.predicted, found.measured
    phases: dict[str, Compared[Any]] = {
        f"{name}_bytes": Compared[Any](predicted.phase_bytes.get(name), measured.phase_bytes.get(name))
        for name in PHASES
    }
    return RankData(
        rank=found.rank,
        peak_bytes=Compared(predicted.peak_bytes, measured.peak_bytes),
        error=found.error,
        persistent_bytes=Compared(predicted.persistent_bytes, measured.persistent_bytes),
        **phases,
        baseline_measured_peak_bytes=found.baseline_peak_bytes,
        runs=found.runs,
        loss_equal=found.loss_equal,
        gradients_equal=found.gradients_equal,
        state_equal=found.state_equal,
        differences=found.differences,
        not_compared=found.not_compared,
    )


def _all_equal(answers: list[bool | None]) -> bool | None:
    """Say no if any rank does, nothing if none has anything to compare: a loss may be on one rank only."""
    known = [answer for answer in answers if answer is not None]
    return all(known) if known else None


def rank_verification_view(data: RankVerificationData, amount: Amount = "usual") -> RenderableType:
    """Lay out a verification of several ranks: one table, a row per rank and figure."""
    if amount == "verdict":
        return verdict_alone(_verdict(data), data.subject.warnings)
    subject = data.subject
    footer = (
        f"predicted in {format_seconds(subject.seconds['capture'])} from {format_count(subject.ops)} ops per "
        f"rank, measured in {format_seconds(subject.seconds['measure'])}, torch {subject.torch}"
    )
    compared = data.plan_made_for is not None
    results = _same_results(data, at_most(MOST_DIFFERENCES, amount)) if compared else []
    return verification_page(
        _verdict(data), data, results, _figures(data), footer=footer, amount=amount, replayed=True
    )


def _verdict(data: RankVerificationData) -> Text:
    line = safe(data.subject.target, "bold").append(f" on {data.world_size} ranks: ")
    if all(rank.peak_bytes.exact for rank in data.ranks):
        line.append("the predicted peak is ").append("exact", "bold green").append(" on every rank")
    else:
        line.append("the predicted peak is up to ").append(percent(abs(data.error)), "bold yellow")
        line.append(f" too {'high' if data.error > 0 else 'low'}")
    return line.append(f"; the largest is {format_count(data.peak_bytes.measured)} bytes")


def _figures(data: RankVerificationData) -> NumberTable:
    table = NumberTable("rank", "predicted", "measured", "error", least=("predicted", "measured"))
    for rank in data.ranks:
        rows = {
            "peak": rank.peak_bytes,
            "forward": rank.forward_bytes,
            "backward": rank.backward_bytes,
            "optimizer": rank.optimizer_bytes,
            "before the step": rank.persistent_bytes,
        }
        for name, figure in rows.items():
            if figure.predicted is not None:
                sizes = format_bytes(figure.predicted), format_bytes(figure.measured)
                table.add_row(f"{rank.rank} {name}", *sizes, error_cell(figure))
        if data.plan_made_for is not None:
            size = format_bytes(rank.baseline_measured_peak_bytes)
            table.add_row(f"{rank.rank} peak without the plan", "", size, "")
    return table


def _same_results(data: RankVerificationData, most: int) -> list[RenderableType]:
    different = [f"not equal on rank {one.rank}: {text}" for one in data.ranks for text in one.differences]
    skipped = [f"not compared on rank {one.rank}: {text}" for one in data.ranks for text in one.not_compared]
    return [
        equality_line("With the plan, on all ranks,", data),
        *indented(different, most),
        *indented(skipped, most),
    ]
