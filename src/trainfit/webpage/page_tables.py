"""Tables and bars of a page: operators, advice, ways, ranks, predicted against measured, orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainfit.basics.units import format_seconds
from trainfit.basics.visible_text import short_operator
from trainfit.report.added_words import shows_waiting, waiting_name
from trainfit.report.data import FrontierData, PlanData, PointRow, VerificationData, WayBeside
from trainfit.report.figure_words import FIGURE_WORDS, written
from trainfit.report.ordered_data import OrderData
from trainfit.report.rank_report import RankVerificationData
from trainfit.traces.trace import PHASES
from trainfit.webpage.page_parts import Part, bar, bars, column, table

if TYPE_CHECKING:
    from trainfit.costs.summary import StepTime
    from trainfit.devices.distinct_ranks import RankPeak
    from trainfit.memory.advice import Advice

_CERTAINTY = {
    "captured": "captured: the changed step",
    "computed": "computed from this trace",
    "bound": "no plan gets below",
    "about": "about: derived from this trace",
}
_FITS = {"fits": "yes", "too close to call": "close", "does not fit": "no"}
_NOT_PREDICTED = "not predicted here"


def operators_table(time: StepTime) -> Part:
    """Return where the time goes, by operator."""
    rows = time.operators
    return table(
        "Every operator (predicted)",
        column("operator", "text", [short_operator(row.name) for row in rows]),
        column("calls", "count", [row.calls for row in rows]),
        column("time", "seconds", [row.seconds for row in rows], "On the device"),
        column("share", "share", [row.share for row in rows], "Of the device's busy time"),
        column("FLOPs", "large", [row.flops for row in rows]),
        column("bound by", "text", [row.bound for row in rows]),
        column("figure from", "text", [row.source for row in rows]),
        sorted_by=2,
        name="operators",
    )


def units_table(time: StepTime) -> Part:
    """Return the communication of each unit: what is waited for, and behind what the rest hides."""
    rows = time.units
    return table(
        "Communication by unit (predicted)",
        column("unit", "text", [row.unit for row in rows]),
        column("collectives", "count", [row.collectives for row in rows]),
        column("exchanged", "bytes", [row.bytes for row in rows]),
        column("takes", "seconds", [row.seconds for row in rows], "Beside whatever it runs"),
        column("waited for", "seconds", [row.exposed_seconds for row in rows], "By computing"),
        column("hides behind", "text", [row.hidden_behind for row in rows], "The most of it"),
        sorted_by=4,
        name="communication",
    )


def operators_part(time: StepTime) -> Part:
    """Return the operators as areas; what limits each is its colour."""
    rows = [
        [short_operator(one.name), float(f"{one.seconds:.4g}"), one.bound]
        for one in time.operators
        if one.seconds > 0
    ]
    return {"kind": "treemap", "operators": rows}


def phases_bars(time: StepTime) -> Part:
    """Return how long each phase takes."""
    rows = [bar(name, getattr(time, f"{name}_seconds"), name) for name in PHASES]
    if time.recompute_seconds:
        rows.append(bar("of backward, recomputation", time.recompute_seconds, "backward"))
    if time.communication_seconds:
        rows.append(bar("communication, beside the rest", time.communication_seconds, "other"))
        rows.append(bar("of it not hidden", time.exposed_communication_seconds, "other"))
    return bars("Time by phase (predicted)", "seconds", rows)


def advice_table(advice: Sequence[Advice]) -> Part:
    """Return what would lower the peak, the most first."""

    def seconds_of(one: Advice) -> str:
        if one.step_seconds is None:
            return _NOT_PREDICTED
        most = one.kind == "plan" or one.kind.startswith("optimizer")
        words = "at most " if most else "about " if one.certainty == "about" else ""
        return words + format_seconds(one.step_seconds)

    return table(
        "What would lower the peak, the most first (predicted)",
        column("what", "text", [one.kind for one in advice]),
        column("is about", "bytes", [one.freed_bytes for one in advice], "Of the bytes at the peak"),
        column("leaves a peak of", "bytes", [one.peak_bytes for one in advice]),
        column("how sure", "text", [_CERTAINTY[one.certainty] for one in advice]),
        column("step takes", "text", [seconds_of(one) for one in advice]),
        column("same results", "text", ["no" if one.changes_results else "yes" for one in advice]),
        column("in words", "text", [one.text for one in advice]),
        name="advice",
    )


def ways_table(data: PlanData) -> Part:
    """Return the plan beside the usual ways."""
    ways = data.ways
    return table(
        "This plan and the usual ways (predicted)",
        column("way", "text", [way.name for way in ways]),
        column("peak", "bytes", [way.peak_bytes for way in ways]),
        column("runs in", "bytes", [way.memory_bytes for way in ways]),
        column("step", "seconds", [way.step_seconds for way in ways]),
        column("added", "added", [way.added for way in ways]),
        column("fits", "text", ["yes" if way.fits else "no" for way in ways]),
        name="ways",
    )


def points_table(data: FrontierData) -> Part:
    """Return the points of a frontier and the usual ways."""
    points, others = data.points, data.ways
    rows: list[PointRow | WayBeside] = [*points, *others]
    names = [*(f"plan {n + 1}" for n in range(len(points))), *(way.name for way in others)]
    columns = [
        column("plan", "text", names),
        column("runs in", "bytes", [row.smallest_memory_bytes for row in rows]),
        column("step", "seconds", [row.step_seconds for row in rows]),
        column("added", "added", [row.added for row in rows], "To the fastest plan"),
        column("fits", "text", [_FITS[row.verdict] for row in rows]),
        column("peak", "bytes", [row.peak_bytes for row in rows]),
        column("regions", "count", [row.regions for row in rows], "Calls of modules that are checkpointed"),
    ]
    if shows_waiting(data):
        waiting = [*(point.waiting_seconds for point in points), *(None for _ in others)]
        about = "Of the time that the plan adds, what is not recomputation"
        columns.insert(4, column(waiting_name(data), "seconds", waiting, about))
    return table("All plans of the frontier, and the usual ways (predicted)", *columns, name="points")


def ranks_table(ranks: Sequence[RankPeak]) -> Part:
    """Return the peaks of the ranks that were looked at."""
    return table(
        "The ranks that can differ (predicted)",
        column("rank", "count", [one.rank for one in ranks]),
        column("peak", "bytes", [one.peak_bytes for one in ranks]),
        name="ranks",
    )


def compared_parts(data: VerificationData) -> list[Part]:
    """Return predicted beside measured, as bars and as a table."""
    peak, before, seconds = data.peak_bytes, data.persistent_bytes, data.seconds
    memory = [
        bar(f"{name}, {what}", getattr(figure, what), what)
        for name, figure in (("peak", peak), ("before the step", before))
        for what in ("predicted", "measured")
    ]
    times = [bar(f"step time, {what}", getattr(seconds, what), what) for what in ("predicted", "measured")]
    rows: list[tuple[str, str, float | None, float, float | None]] = [
        ("peak", "_bytes", peak.predicted, peak.measured, peak.error),
        ("before the step", "_bytes", before.predicted, before.measured, before.error),
        ("step time", "_seconds", seconds.predicted, seconds.measured, seconds.error),
    ]
    if data.ran_with:
        sizes, spent = data.baseline_measured_peak_bytes, data.baseline_measured_seconds
        without = f"without {data.ran_with}"
        memory.append(bar(f"peak {without}, measured", sizes, "measured"))
        times.append(bar(f"step time {without}, measured", spent, "measured"))
        rows.append((f"peak {without}", "_bytes", None, sizes, None))
        rows.append((f"step time {without}", "_seconds", None, spent, None))
    return [
        bars("Memory", "bytes", memory),
        bars("Time", "seconds", times),
        table(
            "All figures",
            column("figure", "text", [name for name, *_ in rows]),
            column("predicted", "figure", [written(unit, one) for _, unit, one, _, _ in rows]),
            column("measured", "figure", [written(unit, one) for _, unit, _, one, _ in rows]),
            _error_column(data, [error for *_, error in rows]),
            name="compared",
        ),
    ]


def _error_column(data: VerificationData, errors: list[float | None]) -> dict[str, Any]:
    """Say how far off each figure is; nobody predicted a compiled step, or another one than the plan's."""
    if data.compiled:
        ratios = [None if error is None else f"{1 + error:.2f} x" for error in errors]
        return column(
            "ratio", "figure", ratios, "The eager step as predicted by the compiled one as measured"
        )
    if data.plan_differences:
        named = ["other step" if error is not None else None for error in errors]
        return column("error", "figure", named, "The plan was made for another step")
    return column("error", "error", errors)


def rank_compared_table(data: RankVerificationData) -> Part:
    """Return predicted beside measured for every rank."""
    names = ("peak_bytes", "forward_bytes", "backward_bytes", "optimizer_bytes", "persistent_bytes")
    rows = [
        (rank.rank, FIGURE_WORDS[name], getattr(rank, name))
        for rank in data.ranks
        for name in names
        if getattr(rank, name).predicted is not None
    ]
    return table(
        "Every rank",
        column("rank", "count", [rank for rank, _, _ in rows]),
        column("figure", "text", [name for _, name, _ in rows]),
        column("predicted", "bytes", [figure.predicted for _, _, figure in rows]),
        column("measured", "bytes", [figure.measured for _, _, figure in rows]),
        column("error", "error", [figure.error for _, _, figure in rows]),
        name="ranks",
    )


def orders_parts(data: OrderData) -> list[Part]:
    """Return the peak that each method reached."""
    rows = [bar(row.name, row.peak_bytes, "best" if row.best else "other") for row in data.rows]
    return [
        bars("Peak by method (predicted)", "bytes", rows),
        table(
            "Peak by method (predicted)",
            column("method", "text", [row.name for row in data.rows]),
            column("peak", "bytes", [row.peak_bytes for row in data.rows]),
            column("of the order as given", "share", [row.share for row in data.rows]),
            name="methods",
        ),
    ]
