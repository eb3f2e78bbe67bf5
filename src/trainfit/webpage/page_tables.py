"""Tables and bars of a page: operators, advice, ways, ranks, predicted against measured, orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainfit.basics.units import format_seconds
from trainfit.report.data import Compared, FrontierData, PlanData, PointRow, VerificationData
from trainfit.report.ordered_data import OrderData
from trainfit.report.rank_report import RankVerificationData
from trainfit.traces.trace import PHASES
from trainfit.webpage.page_parts import Part, column, table

if TYPE_CHECKING:
    from trainfit.costs.summary import StepTime
    from trainfit.devices.distinct_ranks import RankPeak
    from trainfit.memory.advice import Advice
    from trainfit.planning.baselines import Baseline

_CERTAINTY = {
    "captured": "captured: the changed step",
    "computed": "computed from this trace",
    "bound": "no plan gets below",
    "about": "about: derived from this trace",
}
_NOT_PREDICTED = "not predicted here"


def operators_table(time: StepTime) -> Part:
    """Return where the time goes, by operator."""
    rows = time.operators
    return table(
        "Every operator (predicted)",
        column("operator", "text", [row.name for row in rows]),
        column("calls", "count", [row.calls for row in rows]),
        column("time", "seconds", [row.seconds for row in rows], "On the device"),
        column("share", "share", [row.share for row in rows], "Of the device's busy time"),
        column("FLOPs", "large", [row.flops for row in rows]),
        column("bound by", "text", [row.bound for row in rows]),
        column("figure from", "text", [row.source for row in rows]),
        sorted_by=2,
        name="operators",
    )


def short_name(name: str) -> str:
    """Return an operator's name as people say it."""
    return name.removeprefix("aten.").removesuffix(".default")


def operators_part(time: StepTime) -> Part:
    """Return the operators as areas; what limits each is its colour."""
    rows = [
        [short_name(one.name), float(f"{one.seconds:.4g}"), one.bound]
        for one in time.operators
        if one.seconds > 0
    ]
    return {"kind": "treemap", "operators": rows}


def phases_bars(time: StepTime) -> Part:
    """Return how long each phase takes."""
    rows = [_bar(name, getattr(time, f"{name}_seconds"), name) for name in PHASES]
    if time.recompute_seconds:
        rows.append(_bar("of backward, recomputation", time.recompute_seconds, "backward"))
    if time.communication_seconds:
        rows.append(_bar("communication, beside the rest", time.communication_seconds, "other"))
        rows.append(_bar("of it not hidden", time.exposed_communication_seconds, "other"))
    return {"kind": "bars", "caption": "Time by phase (predicted)", "unit": "seconds", "rows": rows}


def _bar(label: str, value: float | int, style: str = "other") -> dict[str, Any]:
    return {"label": label, "value": value, "style": style}


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
    points, others = data.points, data.baselines
    rows: list[PointRow | Baseline] = [*points, *others]
    needed = [*(p.smallest_memory_bytes for p in points), *(w.memory_bytes for w in others)]
    return table(
        "All plans of the frontier, and the usual ways (predicted)",
        column("plan", "text", [*(f"plan {n + 1}" for n in range(len(points))), *(w.name for w in others)]),
        column("peak", "bytes", [row.peak_bytes for row in rows]),
        column("runs in", "bytes", needed),
        column("step", "seconds", [row.step_seconds for row in rows]),
        column("added", "added", [*(p.added for p in points), *(None for _ in others)]),
        column("regions", "count", [row.regions for row in rows]),
        column("verdict", "text", [*(p.verdict for p in points), *("" for _ in others)]),
        name="points",
    )


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
    rows: list[tuple[str, Compared[Any]]] = [("peak", peak), ("before the step", before)]
    bars = [
        _bar(f"{name}, {what}", getattr(figure, what), what)
        for name, figure in rows
        for what in ("predicted", "measured")
    ]
    times = [_bar(f"step time, {what}", getattr(seconds, what), what) for what in ("predicted", "measured")]
    if data.plan_made_for is not None:
        bars.append(_bar("peak without the plan, measured", data.baseline_measured_peak_bytes, "measured"))
        times.append(_bar("step time without the plan, measured", data.baseline_measured_seconds, "measured"))
    errors = [figure.error for _, figure in rows]
    memory = table(
        "Memory",
        column("figure", "text", [name for name, _ in rows]),
        column("predicted", "bytes", [figure.predicted for _, figure in rows]),
        column("measured", "bytes", [figure.measured for _, figure in rows]),
        column("error", "error", errors),
        name="compared",
    )
    return [
        {"kind": "bars", "caption": "Memory", "unit": "bytes", "rows": bars},
        {"kind": "bars", "caption": "Time", "unit": "seconds", "rows": times},
        memory,
    ]


def rank_compared_table(data: RankVerificationData) -> Part:
    """Return predicted beside measured for every rank."""
    names = ("peak_bytes", "forward_bytes", "backward_bytes", "optimizer_bytes", "persistent_bytes")
    rows = [
        (rank.rank, name.removesuffix("_bytes"), getattr(rank, name))
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
    bars = [_bar(row.name, row.peak_bytes, "best" if row.best else "other") for row in data.rows]
    return [
        {"kind": "bars", "caption": "Peak by method (predicted)", "unit": "bytes", "rows": bars},
        table(
            "Peak by method (predicted)",
            column("method", "text", [row.name for row in data.rows]),
            column("peak", "bytes", [row.peak_bytes for row in data.rows]),
            column("of the order as given", "share", [row.share for row in data.rows]),
            name="methods",
        ),
    ]
