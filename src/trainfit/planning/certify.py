"""What a plan promises: its regions replayed on the trace, and nothing but what comes out of that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.allocator.device_memory import StepMemory
from trainfit.allocator.named_options import DEFAULT_OPTIONS
from trainfit.basics.units import format_seconds
from trainfit.costs.schedule import Schedule
from trainfit.costs.table import CostTable
from trainfit.planning.effects import Effect
from trainfit.planning.model_calls import calls_in_pass, forward_ops
from trainfit.planning.replay import Replay, replayed
from trainfit.plans.plan import ModulePart, NamedCall, OpDecision, Plan, Region, RegionKind
from trainfit.traces.simulate import Timeline
from trainfit.traces.trace import Trace
from trainfit.traces.trace_store import operators_hash

_DATA_SHARE = 0.05
"""The bound on the error of a capture whose memory depends on data (docs/benchmarks.md)."""
_MUCH_WAITING = 0.02
"""Of the step without a plan."""
_NUMBER_BYTES = 8
_TIMES_A_NUMBER = ("aten.mul.Tensor", "aten.div.Tensor")


@dataclass(frozen=True)
class Unplanned:
    """The step as it is, which every plan is compared with."""

    trace: Trace
    costs: CostTable
    trace_hash: str
    peak_bytes: int
    step_seconds: float
    world_size: int = 1
    """How many processes divide parameters, gradients and optimizer state, in this trace too."""
    allocator: AllocatorOptions | None = DEFAULT_OPTIONS
    known: Replay | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls, trace: Trace, costs: CostTable, allocator: AllocatorOptions | None = DEFAULT_OPTIONS
    ) -> Unplanned:
        """Return the step of one process."""
        replay = replayed(trace, costs, ())
        peak_bytes, seconds = replay.timeline.peak_bytes, replay.step_seconds
        found = cls(trace, costs, operators_hash(trace), peak_bytes, seconds, allocator=allocator)
        return replace(found, known=replay)

    @property
    def replay(self) -> Replay:
        """The step without a region: asked for several times, and the same each time."""
        return replayed(self.trace, self.costs, ()) if self.known is None else self.known


@dataclass(frozen=True)
class Certified:
    """A plan, memory and time of the step that runs it, and what its regions change in the trace."""

    plan: Plan
    timeline: Timeline = field(repr=False)
    effects: tuple[Effect, ...] = field(repr=False)
    memory: StepMemory = field(repr=False)
    times: Schedule = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        """What the plan promises."""
        return self.plan.peak_bytes

    @property
    def step_seconds(self) -> float:
        """What the plan promises."""
        return self.plan.step_seconds

    @property
    def fits(self) -> bool:
        """Whether it runs within its budget, as the device's allocator hands memory out.

        What runs in exactly so much memory may fail with a little more: blocks lie otherwise then. So what
        counts is the least memory that is shown for it, too.
        """
        plan = self.plan
        within = plan.budget_bytes - plan.peak_bytes + self.timeline.peak_bytes
        if plan.peak_bytes > plan.budget_bytes or not self.memory.runs_within(within):
            return False
        return self.memory.smallest_bytes <= within

    @property
    def memory_bytes(self) -> int:
        """The least memory with which the step runs under the plan, with what the plan sets aside."""
        return self.memory.smallest_bytes + self.plan.peak_bytes - self.timeline.peak_bytes

    def promised(self) -> Plan:
        """Return the plan with the memory that it needs, which takes a while to find."""
        return replace(self.plan, memory_bytes=self.memory_bytes)


def certified(
    step: Unplanned,
    effects: Sequence[Effect],
    budget_bytes: int,
    bound_seconds: float,
    *,
    summed_seconds: float | None = None,
    method: str,
) -> Certified:
    """Replay regions on the trace; return the plan that promises what comes out.

    `bound_seconds` is the least that any plan of this method adds to the step, as the solver sums it up; for
    this plan that sum is `summed_seconds`, by default its recomputation. Where queues overlap, the step takes
    less than the sum: the promised bound is scaled down by as much.
    """
    trace = step.trace
    replay = replayed(trace, step.costs, effects) if effects else step.replay
    timeline, step_seconds = replay.timeline, replay.step_seconds
    regions, kinds = _regions(trace, effects)
    added = step_seconds - step.step_seconds
    if summed_seconds is None:
        summed_seconds = sum(region.recompute_seconds for region in regions)
    # The share of the summed seconds by which the step really gets longer.
    not_overlapped = min(max(added / summed_seconds, 0.0), 1.0) if summed_seconds else 1.0
    reserve = reserve_bytes(trace, timeline)
    peak_bytes = promised_peak(trace, timeline, bool(effects))
    plan = Plan(
        target=trace.target,
        device=step.costs.device.name,
        torch=trace.torch,
        trace_hash=step.trace_hash,
        budget_bytes=budget_bytes,
        kinds=kinds,
        regions=regions,
        peak_bytes=peak_bytes,
        memory_bytes=peak_bytes,
        step_seconds=step_seconds,
        baseline_peak_bytes=step.peak_bytes,
        baseline_step_seconds=step.step_seconds,
        bound_seconds=min(step.step_seconds + bound_seconds * not_overlapped, step_seconds),
        method=method,
        reserve_bytes=reserve,
        world_size=step.world_size,
        settings=trace.settings,
        cluster=trace.cluster,
        parts=parts_of_rank(trace),
    )
    memory = StepMemory(timeline, step.costs.device, step.allocator)
    return Certified(plan, timeline, tuple(effects), memory, replay.times)


def host_warnings(plan: Plan, costs: CostTable) -> tuple[str, ...]:
    """Say so if much of what a plan adds is not recomputation, but the device waiting for the host."""
    recomputed = sum(region.recompute_seconds for region in plan.regions)
    waiting = plan.added_seconds - recomputed
    if costs.host.runs_kernels or waiting < _MUCH_WAITING * plan.baseline_step_seconds:
        return ()
    return (
        f"the plan adds {format_seconds(plan.added_seconds)}, {format_seconds(waiting)} of it because the "
        "device waits for the host: its ops are so short that checkpointing takes Python longer than them. A "
        "larger batch would hide some of that.",
    )


def promised_peak(trace: Trace, timeline: Timeline, has_regions: bool) -> int:
    """Return the peak of a replayed step with what a plan sets aside, and what a trace does not have."""
    numbers = _numbers_bytes(trace) if has_regions else 0
    return timeline.peak_bytes + reserve_bytes(trace, timeline) + numbers


def reserve_bytes(trace: Trace, timeline: Timeline) -> int:
    """Return what is set aside where other data than was assumed may need more; parameters never do."""
    return reserve_of(trace, timeline.peak_bytes)


def reserve_of(trace: Trace, peak_bytes: int) -> int:
    """Return what is set aside with such a peak."""
    if not trace.depends_on_data:
        return 0
    return math.ceil(_DATA_SHARE * (peak_bytes - trace.persistent_bytes))


def peak_within(trace: Trace, budget_bytes: int) -> int:
    """Return the largest peak of a replay that is within the budget together with what is set aside."""
    if not trace.depends_on_data:
        return budget_bytes
    return math.floor((budget_bytes + _DATA_SHARE * trace.persistent_bytes) / (1 + _DATA_SHARE))


def _numbers_bytes(trace: Trace) -> int:
    """Return what autograd keeps of Python numbers that tensors are multiplied with or divided by.

    A trace does not have them: torch makes them without an operator call, and keeps them even where a
    checkpoint drops everything else. On a GPU they are on the host.
    """
    if trace.device != "cpu":
        return 0
    differentiated = {op.forward_op for op in trace.ops}
    return _NUMBER_BYTES * sum(
        number in differentiated and trace.op_name(number) in _TIMES_A_NUMBER
        for number, op in enumerate(trace.ops)
        if len(trace.signatures[op.signature].inputs) == 1
    )


def _regions(trace: Trace, effects: Sequence[Effect]) -> tuple[tuple[Region, ...], tuple[RegionKind, ...]]:
    """Return the regions, call by call, and their kinds; those of several passes over the model are one."""
    places = calls_in_pass(trace)
    found: dict[tuple[str, int], Region] = {}
    kinds: dict[RegionKind, int] = {}
    for effect in effects:
        for call in effect.region.calls:
            kind = kinds.setdefault(_kind(trace, effect, call), len(kinds))
            region = _region(trace, effect, call, places, kind)
            place = (region.module, region.call)
            if before := found.get(place):
                # Sizes may differ from pass to pass; the decisions do not.
                seconds = before.recompute_seconds + region.recompute_seconds
                kept = max(before.kept_bytes, region.kept_bytes)
                moved = max(before.offloaded_bytes, region.offloaded_bytes)
                region = replace(before, kept_bytes=kept, recompute_seconds=seconds, offloaded_bytes=moved)
            found[place] = region
    return tuple(found.values()), tuple(kinds)


def parts_of_rank(trace: Trace) -> tuple[ModulePart, ...]:
    """Return what the rank has of each module; nothing of a step of one process, which has everything."""
    if trace.cluster is None:
        return ()

    def most_bytes(storages: Sequence[int]) -> int:
        # What is gathered is freed by making its storage smaller.
        found = (trace.storages[number] for number in storages)
        return sum(max(one.bytes, *(size for _, size in one.resizes), 0) for one in found)

    own = [module for number, module in enumerate(trace.modules) if number in trace.in_model]
    return tuple(
        ModulePart(module.name, most_bytes(module.parameters), most_bytes(module.gathered))
        for module in own
        if module.parameters
    )


def _kind(trace: Trace, effect: Effect, call: int) -> RegionKind:
    decisions: list[OpDecision] = []
    for number in forward_ops(trace, call):
        signature = trace.signatures[trace.ops[number].signature]
        shapes = tuple(spec.shape for spec in signature.outputs)
        decisions.append(OpDecision(signature.name, shapes, effect.decision(number), signature.random))
    return RegionKind(tuple(decisions), effect.choice.host_inputs)


def _region(trace: Trace, effect: Effect, call: int, places: dict[int, int], kind: int) -> Region:
    """Return what a plan says about one call, which is a region or a part of one."""
    ops = forward_ops(trace, call)
    again = set(effect.segment)
    beside = None
    if effect.host is not None and effect.host.window.overlaps:
        following = effect.host.window.call
        beside = NamedCall(trace.module_name(trace.calls[following].module), places[following])
    own = [n for n, group in enumerate(effect.region.groups) if group.ops[0] in ops]
    kept = [
        size
        for n in own
        if n in effect.choice.kept
        for storage, size in zip(effect.region.groups[n].storages, effect.region.groups[n].sizes)
        if storage in effect.until
    ]
    return Region(
        module=trace.module_name(trace.calls[call].module),
        call=places[call],
        kind=kind,
        kept_bytes=sum(kept),
        offloaded_bytes=sum(trace.occupied_bytes[storage] for storage in effect.fetched),
        beside=beside,
        recompute_seconds=sum(g.seconds for n in own if again.issuperset((g := effect.region.groups[n]).ops)),
        continues=call != effect.region.calls[0],
        whole=effect.by_torch,
    )
