"""What a reader sees of a plan for torch.compile: as of any plan, with a region for each graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainfit.planning.baselines import Baseline
from trainfit.plans.compiled_plan import GraphChoice
from trainfit.report.data import ComparedWay, PlanData, RegionGroup
from trainfit.report.reading import memory_curve, subject_of
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
        subject=subject_of(step.trace, result.device, result.seconds, result.warnings),
        feasible=result.feasible,
        budget_bytes=plan.budget_bytes,
        margin_bytes=result.margin_bytes,
        baseline={"peak_bytes": plan.baseline_peak_bytes, "step_seconds": base},
        peak_bytes=plan.peak_bytes,
        smallest_memory_bytes=plan.memory_bytes,
        reserve_bytes=0,
        host_bytes=0,
        step_seconds=plan.step_seconds,
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
        minimum_peak_bytes=None if result.feasible else plan.peak_bytes,
        minimum_memory_bytes=None if result.feasible else plan.memory_bytes,
        expandable=None,
        added=plan.added_seconds / base if base else 0.0,
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
