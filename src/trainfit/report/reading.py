"""Turn results into what a reader sees of them: shares, groups, rows, verdicts, a short memory curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from trainfit.devices.communicator_buffers import communicators
from trainfit.memory.gathered import gathered_bytes
from trainfit.plans.decisions import Decision
from trainfit.plans.plan import Plan, Region
from trainfit.report.data import (
    Compared,
    ComparedWay,
    EstimateData,
    FrontierData,
    MemoryCurve,
    PlanData,
    PointRow,
    RegionGroup,
    Share,
    StepsSeen,
    Subject,
    VerificationData,
    WayBeside,
)
from trainfit.report.module_rows import largest_rows
from trainfit.report.ordered_data import OrderData, OrderRow
from trainfit.report.way_checked import way_checked
from trainfit.traces.settings import describe, settings_json
from trainfit.traces.trace import CATEGORIES, Trace

if TYPE_CHECKING:
    from trainfit.api.compiled_steps import CompiledPlanResult
    from trainfit.costs.estimates import Estimate
    from trainfit.devices.device_table import Device
    from trainfit.order_fronts.order_result import OrderResult
    from trainfit.planning.baselines import Baseline
    from trainfit.planning.plan_results import Frontier, PlanResult
    from trainfit.traces.simulate import Timeline
    from trainfit.verifying.verification import Verification

MOST_POINTS = 2000
"""A curve with more is no better to look at."""


def estimate_data(estimate: Estimate) -> EstimateData:
    """Return what a reader sees of an estimate."""
    trace, peak = estimate.trace, estimate.peak_bytes
    outside = estimate.device.memory_bytes - estimate.device.usable_bytes
    shares = [Share(name, size, size / peak) for name, size in estimate.by_category.items() if size]
    return EstimateData(
        subject=subject_of(trace, estimate.device, estimate.seconds, estimate.warnings),
        peak_bytes=peak,
        persistent_bytes=estimate.timeline.persistent_bytes,
        allocated_peak_bytes=estimate.memory.allocated_peak_bytes,
        reserved_peak_bytes=estimate.memory.reserved_peak_bytes,
        smallest_memory_bytes=estimate.smallest_memory_bytes,
        libraries={one.name: one.bytes for one in estimate.memory.libraries},
        expandable_saves_bytes=estimate.expandable_saves_bytes,
        context_bytes=outside - (estimate.device.communicator_bytes or 0),
        communicator_bytes=estimate.device.communicator_bytes or 0,
        communicators=len(communicators(trace, estimate.device)),
        fits=estimate.fits,
        verdict=estimate.verdict,
        spare_bytes=estimate.spare_bytes,
        margin_bytes=estimate.device.margin_bytes,
        peak=estimate.peak,
        by_category=dict(estimate.by_category),
        gathered_bytes=gathered_bytes(estimate.timeline),
        communication_bytes=estimate.by_category.get("communication", 0),
        ranks=estimate.ranks,
        advice=estimate.advice,
        time=estimate.time,
        modules=estimate.modules,
        orders={
            name: trace.call_names(getattr(trace, f"{name}_order"))
            for name in ("forward_pre", "forward_post", "backward_pre", "backward_post")
        },
        shares=tuple(sorted(shares, key=lambda share: -share.bytes)),
        rows=tuple(largest_rows(estimate.modules)),
        memory=memory_curve(estimate.timeline),
    )


def memory_curve(timeline: Timeline, most: int = MOST_POINTS) -> MemoryCurve:
    """Return at most so many points of the memory over the step: of each stretch of ops the highest."""
    trace, count = timeline.trace, len(timeline.live_bytes)
    points = min(most, count)
    edges = [count * point // points for point in range(points + 1)] if points else []
    ops = [first + int(timeline.used_bytes[first:last].argmax()) for first, last in pairwise(edges)]
    by_category = timeline.by_category[:, ops]
    by_category[CATEGORIES.index("temporary")] += timeline.workspace_bytes[ops]
    return MemoryCurve(
        ops=tuple(ops),
        names=tuple(trace.op_name(op) for op in ops),
        modules=tuple(trace.module_name(trace.ops[op].module) for op in ops),
        phases=tuple(trace.ops[op].phase for op in ops),
        by_category={name: tuple(row) for name, row in zip(CATEGORIES, by_category.tolist())},
        peak=ops.index(timeline.peak_op) if timeline.peak_op >= 0 else -1,
    )


def plan_data(result: PlanResult) -> PlanData:
    """Return what a reader sees of a plan; if nothing fits, of the one with the smallest peak."""
    plan = result.plan
    decided = [
        {decision.value: sum(op.decision == decision for op in kind.ops) for decision in Decision}
        for kind in plan.kinds
    ]
    return PlanData(
        **figures_of_plan(result, result.trace),
        reserve_bytes=plan.reserve_bytes,
        host_bytes=plan.host_bytes,
        recompute_seconds=_recomputed(plan),
        waiting_seconds=_waiting(plan),
        bound_seconds=plan.bound_seconds,
        gap=plan.gap,
        method=plan.method,
        world_size=max(plan.world_size, result.trace.cluster.world_size if result.trace.cluster else 1),
        trace_hash=plan.trace_hash,
        regions=tuple({**asdict(region), "decisions": decided[region.kind]} for region in plan.regions),
        baselines=result.baselines,
        by_category=dict(result.timeline.peak_by_category),
        advice=result.advice,
        expandable=_expandable(result),
        groups=_groups(plan, decided),
        ways=_ways(plan, result.baselines),
        memory=memory_curve(result.timeline),
    )


def figures_of_plan(result: PlanResult | CompiledPlanResult, trace: Trace) -> dict[str, Any]:
    """Return the fields of `PlanData` that plans of both kinds have."""
    plan, base = result.plan, result.plan.baseline_step_seconds
    return {
        "subject": subject_of(trace, result.device, result.seconds, result.warnings),
        "feasible": result.feasible,
        "budget_bytes": plan.budget_bytes,
        "margin_bytes": result.margin_bytes,
        "baseline": {"peak_bytes": plan.baseline_peak_bytes, "step_seconds": base},
        "peak_bytes": plan.peak_bytes,
        "smallest_memory_bytes": plan.memory_bytes,
        "step_seconds": plan.step_seconds,
        "minimum_peak_bytes": None if result.feasible else plan.peak_bytes,
        "minimum_memory_bytes": None if result.feasible else plan.memory_bytes,
        "added": plan.added_seconds / base if base else 0.0,
    }


def _recomputed(plan: Plan) -> float:
    return sum(region.recompute_seconds for region in plan.regions)


def _waiting(plan: Plan) -> float:
    """Return what a plan adds besides recomputation; some of that may be hidden behind communication."""
    return max(plan.added_seconds - _recomputed(plan), 0.0)


def _expandable(result: PlanResult) -> dict[str, float] | None:
    if result.expandable is None or result.expandable_added is None:
        return None
    return {"step_seconds": result.expandable.step_seconds, "added": result.expandable_added}


def _groups(plan: Plan, decided: Sequence[dict[str, int]]) -> tuple[RegionGroup, ...]:
    """Return the regions with the same decisions as one group each, the most regions first."""
    by_kind: dict[int, list[Region]] = {}
    for region in plan.regions:
        by_kind.setdefault(region.kind, []).append(region)
    return tuple(
        RegionGroup(
            module=members[0].module,
            calls=len(members),
            kept_bytes=sum(region.kept_bytes for region in members),
            recompute_seconds=sum(region.recompute_seconds for region in members),
            decisions=decided[kind],
            offloaded_bytes=sum(region.offloaded_bytes for region in members),
        )
        for kind, members in sorted(by_kind.items(), key=lambda item: -len(item[1]))
    )


def _ways(plan: Plan, baselines: Sequence[Baseline]) -> tuple[ComparedWay, ...]:
    rows = [("this plan", plan.peak_bytes, plan.memory_bytes, plan.step_seconds)]
    rows += [(way.name, way.peak_bytes, way.memory_bytes, way.step_seconds) for way in baselines]
    base = plan.baseline_step_seconds
    return tuple(
        ComparedWay(name, peak, memory, step, step / base - 1 if base else 0.0, memory <= plan.budget_bytes)
        for name, peak, memory, step in rows
    )


def frontier_data(frontier: Frontier) -> FrontierData:
    """Return what a reader sees of a frontier."""
    device, fastest = frontier.device, frontier.points[-1].step_seconds

    def added(seconds: float) -> float | None:
        return seconds / fastest - 1 if fastest else None

    points = tuple(
        PointRow(
            peak_bytes=point.peak_bytes,
            smallest_memory_bytes=point.memory_bytes,
            step_seconds=point.step_seconds,
            bound_seconds=point.plan.bound_seconds,
            regions=len(point.plan.regions),
            verdict=device.verdict(point.memory_bytes),
            added=added(point.step_seconds),
            recompute_seconds=_recomputed(point.plan),
            waiting_seconds=_waiting(point.plan),
        )
        for point in frontier.points
    )
    return FrontierData(
        subject=subject_of(frontier.trace, device, frontier.seconds, frontier.warnings),
        points=points,
        margin_bytes=device.margin_bytes,
        baselines=frontier.baselines,
        best=next((point for point in reversed(points) if point.verdict == "fits"), None),
        ways=tuple(
            WayBeside(
                name=way.name,
                peak_bytes=way.peak_bytes,
                smallest_memory_bytes=way.memory_bytes,
                step_seconds=way.step_seconds,
                regions=way.regions,
                verdict=device.verdict(way.memory_bytes),
                added=added(way.step_seconds),
            )
            for way in frontier.baselines
        ),
    )


def verification_data(found: Verification) -> VerificationData:
    """Return what a reader sees of a verification."""
    measured, comparison = found.measured, found.comparison
    baseline, plan, results = measured, None, None
    if comparison is not None:
        baseline, plan, results = comparison.baseline, comparison.plan, comparison.results
    largest = results.gradients.largest_difference if results else math.inf
    apart = largest if math.isfinite(largest) else None  # JSON has no infinity
    relative = None if results is None or apart is None else apart / (results.gradient_scale or 1.0)
    return VerificationData(
        subject=subject_of(found.trace, found.device, found.seconds, found.warnings),
        peak_bytes=Compared(found.predicted_peak_bytes, measured.peak_bytes),
        error=found.error,
        persistent_bytes=Compared(found.predicted_persistent_bytes, measured.persistent_bytes),
        seconds=Compared(found.predicted_seconds, measured.seconds),
        baseline_measured_peak_bytes=baseline.peak_bytes,
        baseline_measured_seconds=baseline.seconds,
        plan_made_for={"device": plan.device, **settings_json(plan.settings)} if plan else None,
        plan_differences=found.plan_differences,
        compiled=measured.compiled,
        runs=found.runs,
        other_load=measured.load,
        loss_equal=results.loss.equal if results else None,
        gradients_equal=results.gradients.equal if results else None,
        max_gradient_difference=apart,
        state_equal=results.state.equal if results else None,
        differences=results.differences if results else (),
        not_compared=results.not_compared if results else (),
        relative_gradient_difference=relative,
        way=way_checked(comparison),
    )


def order_data(result: OrderResult) -> OrderData:
    """Return what a reader sees of an order."""
    given, order, freed = result.given, result.order, result.released_at_last_use
    base = order.baseline_peak_bytes
    rows = [(method, peak, method == order.method) for method, peak in order.methods.items()]
    rows += [("best", order.peak_bytes, True), ("bound", order.lower_bound_bytes, False)]
    return OrderData(
        target=given.target,
        device=given.device,
        torch=given.torch,
        seconds=dict(result.seconds),
        ops=len(order.steps),
        warnings=given.warnings,
        source=given.source,
        baseline_peak_bytes=base,
        peak_bytes=order.peak_bytes,
        method=order.method,
        methods=dict(order.methods),
        lower_bound_bytes=order.lower_bound_bytes,
        optimal=order.optimal,
        gap=order.gap,
        last_use_peak_bytes=None if freed is None else freed.peak_bytes,
        order=order.names,
        quality=order.quality,
        saved_bytes=base - order.peak_bytes,
        saved_share=(base - order.peak_bytes) / base if base else 0.0,
        rows=tuple(OrderRow(name, peak, peak / base if base else None, best) for name, peak, best in rows),
    )


def subject_of(trace: Trace, device: Device, seconds: dict[str, float], warnings: tuple[str, ...]) -> Subject:
    """Return what a result is about, and how it was found."""
    steps, cluster = trace.steps, trace.cluster
    peaks = steps.peaks[steps.first - 1 :]
    return Subject(
        target=trace.target,
        device=device.name,
        device_usable_bytes=device.usable_bytes,
        torch=trace.torch,
        seconds=dict(seconds),
        ops=len(trace.ops),
        settings=settings_json(trace.settings),
        steps=StepsSeen(
            looked_at=steps.looked_at,
            recorded=steps.recorded,
            first=steps.first,
            differ=steps.differ,
            smallest_peak_bytes=min(peaks, default=None),
            largest_peak_bytes=max(peaks, default=None),
            changing=steps.changing,
            complete=steps.complete,
            leak_bytes_per_step=steps.growth_bytes,
            leaks=steps.grows,
        ),
        warnings=warnings,
        world_size=cluster.world_size if cluster is not None else 1,
        rank=cluster.rank if cluster is not None else 0,
        mesh=dict(cluster.mesh) if cluster is not None else {},
        own_mesh=dict(cluster.own_mesh) if cluster is not None else {},
        gpus_per_node=cluster.gpus_per_node if cluster is not None else None,
        captured_for=trace.device,
        description=describe(trace.settings),
    )
