"""Which sections the page of each kind of result has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.basics.visible_text import shortened
from trainfit.costs.schedule import Schedule, schedule
from trainfit.costs.summary import StepTime, summarise
from trainfit.memory.module_stats import ModuleStats, module_stats
from trainfit.ordering.order_timeline import OrderTimeline, order_timeline
from trainfit.report.added_words import setting_of_estimate, setting_of_plan
from trainfit.report.data import EstimateData, FrontierData, PlanData, Subject, VerificationData
from trainfit.report.ordered_data import OrderData
from trainfit.report.rank_report import RankVerificationData
from trainfit.report.way_checked import rounding_words
from trainfit.traces.simulate import Timeline, simulate
from trainfit.webpage import page_tables as tables
from trainfit.webpage.memory_columns import aligned, curve, line, memory_part
from trainfit.webpage.module_columns import modules_table, treemap_part
from trainfit.webpage.page_parts import Part, Section, Strings, gaps
from trainfit.webpage.queue_lanes import lanes
from trainfit.webpage.trade_offs import frontier_part, plan_part, regions_table

if TYPE_CHECKING:
    from trainfit.costs.estimates import Estimate
    from trainfit.order_fronts.order_result import OrderResult
    from trainfit.planning.plan_results import Frontier, PlanResult
    from trainfit.verifying.rank_verification import RankVerification
    from trainfit.verifying.verification import Verification

_LONGEST_NAME = 120
_MEMORY = "Memory over the step"
_STACKED = "Bytes in use while each op runs, stacked by category (predicted). "


def estimate_sections(data: EstimateData, result: Estimate, strings: Strings) -> list[Section]:
    """Return memory, modules, time, advice and notes."""
    timeline, plan = result.timeline, None if result.costs is None else schedule(result.trace, result.costs)
    usable = data.subject.device_usable_bytes
    limits = [line(f"{data.subject.device}: {format_bytes(usable)} for tensors", usable, "device")]
    if data.reserved_peak_bytes != data.peak_bytes:
        limits.append(
            line(
                f"reserved {format_bytes(data.reserved_peak_bytes)}, predicted",
                data.reserved_peak_bytes,
                "reserved",
            )
        )
    found = [
        _memory([curve("the step", timeline, strings, plan)], limits, plan, data),
        _modules(timeline, result.modules, strings, data.subject),
    ]
    if data.time is not None:
        found.append(_time(data.time))
    if data.advice:
        lead = "" if not data.fits else "The step fits as it is. This would lower its peak all the same. "
        found.append(_help(lead, tables.advice_table(data.advice), setting_of_estimate(data)))
    if data.subject.world_size > 1:
        found.append(_cluster(data))
    return [*found, *_notes(data.subject)]


def _help(lead: str, ranked: Part, setting: str) -> Section:
    return Section("advice", "What would help", f"{lead}{setting}".strip(), (ranked,))


def _memory(
    curves: list[dict[str, Any]], limits: list[dict[str, Any]], plan: Schedule | None, data: EstimateData
) -> Section:
    part = memory_part(curves, limits)
    if plan is not None:
        part["lanes"] = [lanes(plan)]
    peak = data.peak
    where = "outside of modules" if peak.module == "Global" else f"in {shortened(peak.module, _LONGEST_NAME)}"
    lead = f"The peak is in the {peak.phase}, {where}, at {peak.op} (op {format_count(peak.op_index)})."
    if peak.op_index < 0:
        lead = "The peak is what is there before the step."
    return Section("memory", _MEMORY, _STACKED + lead, (part,))


def _modules(
    timeline: Timeline, modules: Sequence[ModuleStats], strings: Strings, subject: Subject
) -> Section:
    lead = "Choose a module to see what is inside it."
    parts = treemap_part(timeline, modules, strings), modules_table(modules, subject.world_size > 1)
    return Section("modules", "Modules", lead, parts)


def _time(time: StepTime) -> Section:
    span = f"{format_seconds(time.lower_seconds)} to {format_seconds(time.upper_seconds)}"
    lead = f"A step takes {format_seconds(time.step_seconds)} (predicted, likely {span})."
    if time.launch_bound:
        lead += f" The device waits {time.waiting_share:.0%} of it for the host to issue kernels."
    if time.uncalibrated_share >= 0.01:
        share = f"{time.uncalibrated_share:.0%}"
        lead += f" {share} of it rests on figures that were never compared with this device."
    parts = tables.phases_bars(time), tables.operators_part(time), tables.operators_table(time)
    return Section("time", "Time", lead, parts)


def _cluster(data: EstimateData) -> Section:
    subject = data.subject
    mesh = subject.mesh_words
    lead = (
        f"This is rank {format_count(subject.rank)} of {format_count(subject.world_size)}, "
        f"{subject.gpus_per_node} per node{f', mesh {mesh}' if mesh else ''}. At the peak it has "
        f"{format_bytes(data.gathered_bytes)} of gathered parameters and "
        f"{format_bytes(data.communication_bytes)} of buffers for communication (predicted)."
    )
    if data.time is not None:
        lead += (
            f" Communication takes {format_seconds(data.time.communication_seconds)}; the step is "
            f"{format_seconds(data.time.exposed_communication_seconds)} longer for it (predicted)."
        )
        if data.time.bubble_seconds:
            lead += (
                f" The stages of the pipeline wait for each other for {data.time.bubble_share:.0%} of their "
                f"time, this one for {format_seconds(data.time.bubble_seconds)} of each step (predicted)."
            )
    parts: tuple[Part, ...] = (tables.ranks_table(data.ranks),) if data.ranks else ()
    if data.time is not None and data.time.units:
        parts += (tables.units_table(data.time),)
    return Section("cluster", "One rank of several", lead, parts)


def _notes(subject: Subject | OrderData) -> list[Section]:
    counts = Counter(subject.warnings)
    notes = [f"{text} ({count} times)" if count > 1 else text for text, count in counts.items()]
    if not notes:
        return []
    return [Section("notes", "What had to be assumed", "", (), tuple(notes))]


def plan_sections(data: PlanData, result: PlanResult, strings: Strings) -> list[Section]:
    """Return memory with and without the plan, the usual ways, regions, modules, advice and notes."""
    planned, plain = result.timeline, simulate(result.trace)
    schedules = [result.times, schedule(plain.trace, result.costs)]
    stats = _timed(planned, summarise(schedules[0]))
    found = [_planned_memory(data, (planned, plain), schedules, strings)]
    found.append(
        Section(
            "ways",
            "Beside the usual ways",
            "Memory that each needs against the time of a step (predicted): lower and to the left is better.",
            (plan_part(data, result.plan, result.trace), tables.ways_table(data)),
        )
    )
    if result.plan.regions:
        lead = (
            f"The plan checkpoints {format_count(len(result.plan.regions))} calls of modules and recomputes "
            f"{format_seconds(data.recompute_seconds)} in every step (predicted)."
        )
        regions = regions_table(result.plan, module_stats(plain), plain.trace)
        found.append(Section("plan", "What the plan does", lead, (regions,)))
    found.append(_modules(planned, stats, strings, data.subject))
    if data.advice:
        found.append(_help("", tables.advice_table(data.advice), setting_of_plan(data)))
    return [*found, *_notes(data.subject)]


def _planned_memory(
    data: PlanData, timelines: tuple[Timeline, Timeline], schedules: list[Schedule], strings: Strings
) -> Section:
    planned, plain = timelines
    limits = [line(f"budget {format_bytes(data.budget_bytes)}", data.budget_bytes, "budget")]
    usable = data.subject.device_usable_bytes
    if usable != data.budget_bytes:
        limits.append(line(f"{data.subject.device}: {format_bytes(usable)}", usable, "device"))
    if not data.regions:
        part = memory_part([curve("the step", plain, strings, schedules[1])], limits)
        part["lanes"] = [lanes(schedules[1])]
        return Section("memory", _MEMORY, _STACKED, (part,))
    curves = [
        curve("with the plan", planned, strings, schedules[0]),
        curve("without the plan", plain, strings, schedules[1]),
    ]
    part = memory_part(curves, limits)
    part["aligned"] = aligned(planned.trace, plain.trace)
    part["lanes"] = [lanes(one) for one in schedules]
    lead = _STACKED + "The outline is the same op of the other step."
    return Section("memory", _MEMORY, lead, (part,))


def _timed(timeline: Timeline, time: StepTime) -> tuple[ModuleStats, ...]:
    return tuple(
        replace(module, forward_seconds=forward, backward_seconds=backward)
        for module, (forward, backward) in zip(module_stats(timeline), time.module_seconds)
    )


def frontier_sections(data: FrontierData, result: Frontier, strings: Strings) -> list[Section]:
    """Return the plans against each other, and the memory of the step without any."""
    timeline = simulate(result.trace)
    usable = data.subject.device_usable_bytes
    limits = [line(f"{data.subject.device}: {format_bytes(usable)} for tensors", usable, "device")]
    part = memory_part([curve("without a plan", timeline, strings)], limits)
    lead = (
        "Each point is the fastest plan that was found for its memory (predicted). Move the slider to see "
        "what each plan recomputes."
    )
    parts = frontier_part(result, data), tables.points_table(data)
    return [
        Section("frontier", "Memory against time", lead, parts),
        Section("memory", "Memory over the step without a plan", _STACKED, (part,)),
        _modules(timeline, module_stats(timeline), strings, data.subject),
        *_notes(data.subject),
    ]


def verification_sections(data: VerificationData, result: Verification, strings: Strings) -> list[Section]:
    """Return predicted against measured, whether a plan changes results, and the predicted memory."""
    timeline = simulate(result.trace)
    notes = [f"not equal: {text}" for text in data.differences]
    notes += [f"not compared: {text}" for text in data.not_compared]
    found = [
        Section("compared", "Predicted against measured", _load(data), tuple(tables.compared_parts(data))),
    ]
    if data.way is not None and data.way.by_rounding:
        found.append(Section("results", "The way's results", rounding_words(data.way), (), tuple(notes)))
    elif data.ran_with:
        answers = {True: "the same, bit by bit", False: "not the same", None: "not comparable"}
        lead = (
            f"With {data.ran_with} the loss is {answers[data.loss_equal]}, the gradients are "
            f"{answers[data.gradients_equal]}, parameters and buffers afterwards are "
            f"{answers[data.state_equal]} (measured)."
        )
        found.append(Section("results", f"T{data.ran_with[1:]}'s results", lead, (), tuple(notes)))
    # The memory that is drawn is that of the step without the plan, or with the way.
    planned = data.plan_made_for is not None
    measured = data.baseline_measured_peak_bytes if planned else data.peak_bytes.measured
    limits = [line("peak without the plan, measured" if planned else "peak, measured", measured, "measured")]
    part = memory_part([curve("the step, predicted", timeline, strings)], limits)
    lead = _STACKED + "The line is the peak that was measured."
    found.append(Section("memory", _MEMORY, lead, (part,)))
    return [*found, _modules(timeline, module_stats(timeline), strings, data.subject), *_notes(data.subject)]


def _load(data: VerificationData) -> str:
    runs = f"The real step ran {data.runs['total']} times on this machine."
    if data.other_load is None:
        return runs
    return f"{runs} Other work kept {data.other_load:.0%} of it busy meanwhile."


def rank_verification_sections(
    data: RankVerificationData, result: RankVerification, strings: Strings
) -> list[Section]:
    """Return every rank: predicted against measured."""
    notes = [f"not equal on rank {one.rank}: {text}" for one in data.ranks for text in one.differences]
    part = tables.rank_compared_table(data)
    return [
        Section("compared", "Predicted against measured", "", (part,), tuple(notes)),
        *_notes(data.subject),
    ]


def order_sections(data: OrderData, result: OrderResult, strings: Strings) -> list[Section]:
    """Return what each method reached, and memory over the order as given and over the best one."""
    graph, order = result.order.graph, result.order
    best = _order_curve("the best order", order_timeline(graph, order.steps), strings)
    given = _order_curve("the order as given", order_timeline(graph), strings)
    least = data.lower_bound_bytes
    bound = line(f"no order is below {format_bytes(least)}", least, "budget")
    lead = "Bytes in use while each node runs (predicted). The outline is the other order, step by step."
    return [
        Section("orders", "What each method reached", "", tuple(tables.orders_parts(data))),
        Section("memory", "Memory over the order", lead, (memory_part([best, given], [bound]),)),
        *_notes(data),
    ]


def _order_curve(label: str, timeline: OrderTimeline, strings: Strings) -> dict[str, Any]:
    """Return memory over an order, as a curve of one category."""
    values = list(timeline.after_alloc)
    peak = max(values, default=0)
    nowhere = strings.number("")
    everywhere = [min(step, 1) for step in range(len(values))]
    return {
        "label": label,
        "ops": len(values),
        "names": [strings.number(timeline.graph.nodes[node].name) for node in timeline.order],
        "modules": [nowhere] * len(values),
        "phases": [],
        "recomputed": [],
        "categories": [{"name": "buffers", "at": everywhere, "by": gaps(values)}],
        "before": timeline.initial_bytes,
        "peak": values.index(peak) if values else -1,
        "peak_bytes": peak,
    }
