"""Plans and the usual ways as points, memory against time, and what each plan keeps and recomputes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainfit.basics.visible_text import short_operator
from trainfit.memory.module_stats import ModuleStats
from trainfit.plans.decisions import Decision
from trainfit.plans.plan import Plan, Region
from trainfit.report.added_words import waiting_words
from trainfit.report.data import FrontierData, PlanData
from trainfit.traces.trace import Trace
from trainfit.webpage.module_columns import alike
from trainfit.webpage.page_parts import Part, column, table
from trainfit.webpage.peak_places import numbered

if TYPE_CHECKING:
    from trainfit.planning.baselines import Baseline
    from trainfit.planning.plan_results import Frontier

_MOST_OPERATORS = 6
_MOST_NAMES = 4


@dataclass(frozen=True)
class RegionsAlike:
    """Regions with the same ops and the same decisions, whose modules are alike."""

    label: str
    members: tuple[Region, ...]
    counts: dict[str, int]
    """How many ops of one region have each decision."""
    recomputed: tuple[tuple[str, int], ...]
    """Operators that one region runs again, the most frequent first."""
    saved: tuple[tuple[str, int], ...]


def regions_alike(plan: Plan, trace: Trace) -> list[RegionsAlike]:
    """Group the regions of a plan, those that recompute the longest first; views are not worth naming."""
    views = {signature.name for signature in trace.signatures if signature.view}
    groups: dict[tuple[int, str], list[Region]] = {}
    for region in plan.regions:
        groups.setdefault((region.kind, alike(region.module)), []).append(region)
    found = []
    for (kind, name), members in groups.items():
        ops = plan.kinds[kind].ops
        named = {
            what: Counter(
                short_operator(op.name) for op in ops if op.decision == what and op.name not in views
            )
            for what in Decision
        }
        found.append(
            RegionsAlike(
                label=_label(name, members),
                members=tuple(members),
                counts={what: sum(op.decision == what for op in ops) for what in Decision},
                recomputed=tuple(named[Decision.RECOMPUTE].most_common()),
                saved=tuple(named[Decision.SAVE].most_common()),
            )
        )
    return sorted(found, key=lambda group: -sum(region.recompute_seconds for region in group.members))


def _label(name: str, members: Sequence[Region]) -> str:
    """Name a group: one module by its name, several by what they share and their numbers."""
    names = list(dict.fromkeys(region.module for region in members))
    if len(names) == 1:
        return names[0]
    if name.count("*") != 1:
        return f"{name} ({len(names)} modules)"
    head, _, tail = name.partition("*")
    numbers = [module.removeprefix(head).removesuffix(tail) for module in names]
    return numbered(head, sorted(map(int, numbers)), tail)


def regions_table(plan: Plan, modules: Sequence[ModuleStats], trace: Trace) -> Part:
    """Return what a plan does, one row for regions that are alike: what they cost and save."""
    groups = regions_alike(plan, trace)
    without = {module.name: module.activation_bytes // max(module.calls, 1) for module in modules}
    kept = [sum(region.kept_bytes for region in group.members) for group in groups]
    moved = [sum(region.offloaded_bytes for region in group.members) for group in groups]
    before = [sum(without.get(region.module, 0) for region in group.members) for group in groups]
    columns = [
        column("region", "text", [group.label for group in groups]),
        column("calls", "count", [len(group.members) for group in groups]),
        column("keeps", "bytes", kept, "From forward to backward, besides inputs"),
        column("saves about", "bytes", [max(old - new, 0) for old, new in zip(before, kept)]),
        column("on the host", "bytes", moved, "Copied there after forward, and back before backward"),
        column("costs", "seconds", [_seconds(group) for group in groups], "Recomputed in every step"),
        column("ops kept", "count", [group.counts["save"] for group in groups], "Of one region"),
        column("ops recomputed", "count", [group.counts["recompute"] for group in groups], "Of one region"),
        column("ops skipped", "count", [group.counts["skip"] for group in groups], "Of one region"),
        column("ops offloaded", "count", [group.counts["offload"] for group in groups], "Of one region"),
        column("recomputes", "text", [_operators(group.recomputed) for group in groups]),
        column("keeps the results of", "text", [_operators(group.saved) for group in groups]),
    ]
    caption = "Checkpointed regions; those with the same ops and decisions are one row (predicted)"
    return table(caption, *(one for one in columns if any(one["values"])), name="regions")


def _seconds(group: RegionsAlike) -> float:
    return sum(region.recompute_seconds for region in group.members)


def _operators(names: Sequence[tuple[str, int]]) -> str:
    shown = [f"{name} ({count} x)" if count > 1 else name for name, count in names[:_MOST_OPERATORS]]
    more = len(names) - _MOST_OPERATORS
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def frontier_part(frontier: Frontier, data: FrontierData) -> Part:
    """Return every plan of a frontier, with what it recomputes, the usual ways, and the device's memory."""
    points = [
        {
            "memory": row.smallest_memory_bytes,
            "peak": row.peak_bytes,
            "seconds": row.step_seconds,
            "added": row.added,
            "waiting": waiting_words(data, row.waiting_seconds),
            "verdict": row.verdict,
            "groups": _what(point.plan, frontier.trace),
        }
        for row, point in zip(data.points, frontier.points)
    ]
    usable = data.subject.device_usable_bytes
    lines = [{"label": f"{data.subject.device} has", "bytes": usable, "style": "device"}]
    if data.margin_bytes:
        lines.append({"label": "with its margin", "bytes": usable - data.margin_bytes, "style": "budget"})
    chosen = next((number for number, row in enumerate(data.points) if row is data.best), 0)
    return {
        "kind": "trade_off",
        "points": points,
        "chosen": chosen,
        "ways": _ways(data.baselines),
        "lines": lines,
    }


def _what(plan: Plan, trace: Trace) -> list[dict[str, Any]]:
    return [
        {
            "label": group.label,
            "calls": len(group.members),
            "seconds": _seconds(group),
            "kept": sum(region.kept_bytes for region in group.members),
            "recomputes": _operators(group.recomputed[:_MOST_NAMES]),
        }
        for group in regions_alike(plan, trace)
    ]


def _ways(baselines: Sequence[Baseline]) -> list[dict[str, Any]]:
    return [
        {"name": way.name, "memory": way.memory_bytes, "peak": way.peak_bytes, "seconds": way.step_seconds}
        for way in baselines
    ]


def plan_part(data: PlanData, plan: Plan, trace: Trace) -> Part:
    """Return a plan beside the usual ways, with its budget."""
    point = {
        "memory": data.smallest_memory_bytes,
        "peak": data.peak_bytes,
        "seconds": data.step_seconds,
        "added": data.added,
        "waiting": waiting_words(data, data.waiting_seconds),
        "verdict": "fits" if data.feasible else "does not fit",
        "groups": _what(plan, trace),
    }
    return {
        "kind": "trade_off",
        "points": [point],
        "chosen": 0,
        "ways": _ways(data.baselines),
        "lines": [{"label": "budget", "bytes": data.budget_bytes, "style": "budget"}],
    }
