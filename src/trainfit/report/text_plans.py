"""Plans and frontiers as a person reads them: does it fit, what it costs, the usual ways beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from trainfit.report.tables import NumberTable, margin_words, safe, settings_lines, warning_lines
from trainfit.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from trainfit.planning.baselines import Baseline
    from trainfit.planning.plan_results import Frontier, PlanResult
    from trainfit.plans import Plan, Region

_MOST_KINDS = 10
_FITS = {
    "fits": Text("yes", "green"),
    "too close to call": Text("close", "yellow"),
    "does not fit": Text("no", "red"),
}


def plan_view(result: PlanResult) -> RenderableType:
    """Lay out a plan: does it fit, what it costs, how good it is, the usual ways beside it, its regions."""
    plan = result.plan
    parts: list[RenderableType] = [
        _plan_headline(result),
        *settings_lines(result.trace),
        Text(),
        _alternatives(result.baselines, plan),
    ]
    regions = _plan_regions(plan)
    if regions is not None:
        parts += [Text(), regions]
    parts += warning_lines(result.warnings)
    parts += [Text(), _plan_footer(result)]
    return Group(*parts)


def frontier_view(frontier: Frontier) -> RenderableType:
    """Lay out a frontier: the least time for every peak."""
    table = NumberTable("peak (predicted)", "step", "added", "regions", "fits")
    fastest = frontier.points[-1].step_seconds
    for point in frontier.points:
        table.add_row(
            format_bytes(point.peak_bytes),
            format_seconds(point.step_seconds),
            f"{point.step_seconds / fastest - 1:.1%}" if fastest else "-",
            format_count(len(point.plan.regions)),
            _FITS[frontier.device.verdict(point.peak_bytes)],
        )
    budget = frontier.device.default_budget_bytes
    best = next((p for p in reversed(frontier.points) if p.peak_bytes <= budget), None)
    line = safe(frontier.trace.target, "bold").append(" on ").append_text(safe(frontier.device.name))
    if best is None:
        line.append(": nothing fits", "bold red")
    else:
        line.append(f": the fastest that fits takes {format_seconds(best.step_seconds)} per step and ")
        line.append(format_bytes(best.peak_bytes), "bold").append(" (predicted)")
    parts: list[RenderableType] = [
        line,
        *settings_lines(frontier.trace),
        Text(),
        table,
    ]
    if frontier.device.margin_bytes:
        parts += [Text(), Text(f"close: within {margin_words(frontier.device.margin_bytes)}", "dim")]
    return Group(*parts)


def _plan_headline(result: PlanResult) -> Text:
    plan = result.plan
    line = safe(plan.target, "bold").append(f" on {result.device.name}")
    if plan.world_size > 1:
        line.append(f", in each of {plan.world_size} processes")
    line.append(": ")
    if not result.feasible:
        line.append(f"no plan fits into {format_bytes(plan.budget_bytes)}", "bold red")
        return line.append(f"; the smallest peak is {format_bytes(plan.peak_bytes)} (predicted)")
    if not plan.regions:
        line.append("fits as it is", "bold green")
        both = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)}"
        return line.append(f": {both} (predicted)")
    line.append(f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)}", "bold green")
    added = plan.added_seconds / plan.baseline_step_seconds if plan.baseline_step_seconds else 0.0
    line.append(f" at {format_seconds(plan.step_seconds)} per step, {added:+.1%} (predicted). ")
    return line.append(f"No plan of this kind is more than {plan.gap:.2%} faster.")


def _alternatives(baselines: Sequence[Baseline], plan: Plan) -> NumberTable:
    table = NumberTable("compared (predicted)", "peak", "step", "added", "fits")
    rows = [("this plan", plan.peak_bytes, plan.step_seconds)]
    rows += [(baseline.name, baseline.peak_bytes, baseline.step_seconds) for baseline in baselines]
    for name, peak, step in rows:
        added = step / plan.baseline_step_seconds - 1 if plan.baseline_step_seconds else 0.0
        fits = Text("yes", "green") if peak <= plan.budget_bytes else Text("no", "red")
        label = Text(name, "bold" if name == "this plan" else "")
        table.add_row(label, format_bytes(peak), format_seconds(step), f"{added:+.1%}", fits)
    return table


def _plan_regions(plan: Plan) -> NumberTable | None:
    """Return the regions with the same decisions as one line each."""
    if not plan.regions:
        return None
    table = NumberTable("checkpointed", "calls", "keep", "recompute", "saved ops", "repeated", "skipped")
    by_kind: dict[int, list[Region]] = {}
    for region in plan.regions:
        by_kind.setdefault(region.kind, []).append(region)
    for kind, members in sorted(by_kind.items(), key=lambda item: -len(item[1]))[:_MOST_KINDS]:
        decisions = [op.decision for op in plan.kinds[kind].ops]
        first = members[0].module
        name = first if len(members) == 1 else f"{first} and {len(members) - 1} more"
        table.add_row(
            safe(name),
            format_count(len(members)),
            format_bytes(sum(region.kept_bytes for region in members)),
            format_seconds(sum(region.recompute_seconds for region in members)),
            *(format_count(decisions.count(decision)) for decision in ("save", "recompute", "skip")),
        )
    return table


def _plan_footer(result: PlanResult) -> Text:
    seconds = result.seconds
    reserve = result.plan.reserve_bytes
    aside = f"{format_bytes(reserve)} of the peak set aside: memory depends on data\n" if reserve else ""
    margin = (
        f"budget: the device without {margin_words(result.margin_bytes)}\n" if result.margin_bytes else ""
    )
    return Text(
        f"{aside}{margin}{format_count(len(result.trace.ops))} ops, "
        f"captured in {format_seconds(seconds['capture'])}, "
        f"solved in {format_seconds(seconds['solve'])}, torch {result.trace.torch}",
        "dim",
    )
