"""Plans and frontiers as a person reads them: does it fit, what it costs, the usual ways beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.report.added_words import SETTING, setting_of_plan, shows_waiting, waiting_name
from trainfit.report.amounts import Amount, at_most, stage_times, verdict_alone
from trainfit.report.compiled_plans import METHOD
from trainfit.report.data import ComparedWay, FrontierData, PlanData, RegionGroup
from trainfit.report.sparkline import Sparkline
from trainfit.report.tables import (
    MOST_WARNINGS,
    NumberTable,
    margin_words,
    name_text,
    safe,
    settings_lines,
    stacked,
)

_MOST_GROUPS = 10
_OF_REGIONS = {"save": "saved ops", "recompute": "repeated", "skip": "skipped", "offload": "offloaded"}
"""What ops of a region are called, by decision."""
_FITS = {
    "fits": Text("yes", "green"),
    "too close to call": Text("close", "yellow"),
    "does not fit": Text("no", "red"),
}


def plan_view(data: PlanData, amount: Amount = "usual") -> RenderableType:
    """Lay out a plan: does it fit, what it costs, how good it is, the usual ways beside it, its regions."""
    if amount == "verdict":
        return verdict_alone(_plan_headline(data), data.subject.warnings)
    return stacked(
        [_plan_headline(data), *_expandable(data), *settings_lines(data.subject)],
        [_ways(data.ways, on_gpu=data.subject.captured_for == "cuda")],
        [Sparkline(data.memory)] if data.memory.ops else [],
        _checkpointed(data, amount),
        stage_times(data.subject.seconds, amount),
        warnings=data.subject.warnings,
        most_warnings=at_most(MOST_WARNINGS, amount),
        footer=_plan_footer(data),
    )


def frontier_view(data: FrontierData, amount: Amount = "usual") -> RenderableType:
    """Lay out a frontier: the least time for every peak."""
    subject = data.subject
    if amount == "verdict":
        return verdict_alone(_frontier_headline(data), subject.warnings)
    on_gpu = subject.captured_for == "cuda"
    columns = ("runs in (predicted)", "peak") if on_gpu else ("peak (predicted)",)
    waiting = shows_waiting(data)
    named = (waiting_name(data),) if waiting else ()
    table = NumberTable(
        *columns, "step", "added", "regions", "fits", *named, least=("peak", "regions", *named, "added")
    )
    for point in data.points:
        sizes = (point.smallest_memory_bytes, point.peak_bytes) if on_gpu else (point.peak_bytes,)
        table.add_row(
            *(format_bytes(size) for size in sizes),
            format_seconds(point.step_seconds),
            "-" if point.added is None else f"{point.added:+.1%}",
            format_count(point.regions),
            _FITS[point.verdict],
            *((format_seconds(point.waiting_seconds),) if waiting else ()),
        )
    is_close = any(point.verdict == "too close to call" for point in data.points)
    footer = f"close: within {margin_words(data.margin_bytes)}" if is_close else ""
    times = stage_times(subject.seconds, amount)
    return stacked(
        [_frontier_headline(data), *settings_lines(subject)],
        [table],
        times,
        warnings=subject.warnings,
        most_warnings=at_most(MOST_WARNINGS, amount),
        footer=footer,
    )


def _frontier_headline(data: FrontierData) -> Text:
    subject, best = data.subject, data.best
    line = safe(subject.target, "bold").append(" on ").append_text(safe(subject.device))
    if best is None:
        return line.append(": nothing fits", "bold red")
    line.append(f": the fastest that fits takes {format_seconds(best.step_seconds)} per step and ")
    return line.append(format_bytes(best.smallest_memory_bytes), "bold").append(" (predicted)")


def _plan_headline(data: PlanData) -> Text:
    line = safe(data.subject.target, "bold").append(f" on {data.subject.device}")
    if data.subject.world_size > 1:
        line.append(f", rank {format_count(data.subject.rank)} of {format_count(data.subject.world_size)}")
        mesh = data.subject.mesh_words
        line.append_text(safe(f" ({mesh})" if mesh else ""))
    elif data.world_size > 1:
        line.append(f", in each of {data.world_size} processes")
    line.append(": ")
    if not data.feasible:
        line.append(f"no plan fits into {format_bytes(data.budget_bytes)}", "bold red")
        least = format_bytes(data.smallest_memory_bytes)
        return line.append(f"; the least that was found is {least} (predicted)")
    both = f"{format_bytes(data.smallest_memory_bytes)} of {format_bytes(data.budget_bytes)}"
    if not data.regions:
        return line.append("fits as it is", "bold green").append(f": {both} (predicted)")
    line.append(both, "bold green")
    line.append(f" at {format_seconds(data.step_seconds)} per step, {data.added:+.1%} (predicted). ")
    if data.method == METHOD:
        return line.append("torch.compile carries it out: trainfit.apply(model, plan).")
    return line.append(f"No plan of this kind is more than {data.gap:.2%} faster.")


def _expandable(data: PlanData) -> list[Text]:
    """Say what a setting of the allocator would be worth."""
    sentence = setting_of_plan(data)
    if not sentence:
        return []
    line = Text(sentence)
    line.highlight_words([SETTING], "bold")
    return [line]


def _checkpointed(data: PlanData, amount: Amount) -> list[RenderableType]:
    if not data.regions:
        return []
    offloads = data.host_bytes > 0
    if amount == "all":
        return [_every_region(data.regions, offloads=offloads)]
    return [_regions(data.groups[:_MOST_GROUPS], offloads=offloads)]


def _ways(ways: Sequence[ComparedWay], *, on_gpu: bool) -> NumberTable:
    """Compare ways; on a GPU the memory that they run in is more than their peak."""
    columns = ("peak", "runs in") if on_gpu else ("peak",)
    least = ("peak", "step", "runs in") if on_gpu else ("step", "peak")
    table = NumberTable("compared (predicted)", *columns, "step", "added", "fits", least=least)
    for way in ways:
        table.add_row(
            Text(way.name, "bold" if way is ways[0] else ""),
            *(format_bytes(size) for size in (way.peak_bytes, way.memory_bytes)[: len(columns)]),
            format_seconds(way.step_seconds),
            f"{way.added:+.1%}",
            _FITS["fits" if way.fits else "does not fit"],
        )
    return table


def _columns(*, offloads: bool) -> list[str]:
    """Return what is said of each region; of copies to the host only where there are some."""
    return [
        "keep",
        *(["on host"] if offloads else []),
        "recompute",
        *list(_OF_REGIONS.values())[: 3 + offloads],
    ]


def _regions(groups: Sequence[RegionGroup], *, offloads: bool) -> NumberTable:
    table = NumberTable("checkpointed", "calls", *_columns(offloads=offloads))
    for group in groups:
        label = name_text(group.module).append("" if group.calls == 1 else f" and {group.calls - 1} more")
        table.add_row(label, format_count(group.calls), *_region_cells(vars(group), offloads=offloads))
    return table


def _every_region(regions: Sequence[Mapping[str, Any]], *, offloads: bool) -> NumberTable:
    """List each call of a module by itself."""
    table = NumberTable("checkpointed", *_columns(offloads=offloads))
    for region in regions:
        label = name_text(region["module"])
        table.add_row(
            label.append(f" (call {region['call'] + 1})" if region["call"] else "", "dim"),
            *_region_cells(region, offloads=offloads),
        )
    return table


def _region_cells(region: Mapping[str, Any], *, offloads: bool) -> list[str]:
    decided = [region["decisions"][decision] for decision in _OF_REGIONS]
    return [
        format_bytes(region["kept_bytes"]),
        *([format_bytes(region["offloaded_bytes"])] if offloads else []),
        format_seconds(region["recompute_seconds"]),
        *(format_count(count) for count in decided[: 3 + offloads]),
    ]


def _plan_footer(data: PlanData) -> str:
    subject, reserve, margin = data.subject, data.reserve_bytes, data.margin_bytes
    lines = [
        f"{format_bytes(reserve)} of the peak set aside: memory depends on data" if reserve else "",
        f"budget: the device without {margin_words(margin)}" if margin else "",
        f"{format_bytes(data.host_bytes)} of the host's memory are needed as well" if data.host_bytes else "",
        f"{format_count(subject.ops)} ops, captured in {format_seconds(subject.seconds['capture'])}, "
        f"solved in {format_seconds(subject.seconds['solve'])}, torch {subject.torch}",
    ]
    return "\n".join(line for line in lines if line)
