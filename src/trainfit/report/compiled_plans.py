"""What a reader sees of a plan for torch.compile: as of any plan, with a region for each graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainfit.planning.baselines import Baseline
from trainfit.plans.compiled_plan import GraphChoice
from trainfit.report.data import ComparedWay, PlanData, RegionGroup
from trainfit.report.reading import figures_of_plan, memory_curve
from trainfit.traces.trace_store import operators_hash

if TYPE_CHECKING:
    from trainfit.api.compiled_steps import CompiledPlanResult

METHOD = "compiled"
"""Of plans that torch.compile carries out."""


def compiled_plan_data(result: CompiledPlanResult) -> PlanData:
    """Return what a reader sees of a plan for torch.compile."""
    plan, step, before = result.plan, result.step, result.baseline
    regions = tuple(_region(number, graph) for number, graph in enumerate(plan.graphs))
    base = plan.baseline_step_seconds
    way = Baseline("torch.compile alone", len(regions), plan.baseline_peak_bytes, before.memory_bytes, base)
    repeated = sum(region["recompute_seconds"] for region in regions)
    rows = [
        ("this plan", plan.peak_bytes, plan.memory_bytes, plan.step_seconds),
        (way.name, way.peak_bytes, way.memory_bytes, way.step_seconds),
    ]
    return PlanData(
        **figures_of_plan(result, step.trace),
        reserve_bytes=0,
        host_bytes=0,
        recompute_seconds=repeated,
        waiting_seconds=0.0,
        bound_seconds=0.0,
        gap=1.0,
        method=METHOD,
        world_size=1,
        trace_hash=operators_hash(step.trace),
        regions=regions,
        baselines=(way,),
        by_category=dict(step.timeline.peak_by_category),
        advice=(),
        expandable=None,
        groups=tuple(_group(region) for region in regions),
        ways=tuple(
            ComparedWay(name, peak, memory, seconds, seconds / base - 1 if base else 0.0, fits)
            for name, peak, memory, seconds in rows
            for fits in (memory <= plan.budget_bytes,)
        ),
        memory=memory_curve(step.timeline),
    )


def _region(number: int, graph: GraphChoice) -> dict[str, Any]:
    decided = {"save": len(graph.kept), "recompute": graph.repeated, "skip": 0, "offload": 0}
    return {
        "module": f"graph {number}",
        "call": 0,
        "kind": number,
        "kept_bytes": graph.kept_bytes,
        "recompute_seconds": graph.recompute_seconds,
        "continues": False,
        "whole": False,
        "offloaded_bytes": 0,
        "beside": None,
        "decisions": decided,
    }


def _group(region: dict[str, Any]) -> RegionGroup:
    return RegionGroup(
        module=region["module"],
        calls=1,
        kept_bytes=region["kept_bytes"],
        recompute_seconds=region["recompute_seconds"],
        decisions=region["decisions"],
    )
