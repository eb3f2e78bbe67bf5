"""What a plan promises: its regions replayed on the trace, and nothing but what comes out of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainfit.costs.schedule import schedule
from trainfit.costs.table import CostTable
from trainfit.planning.effects import Effect
from trainfit.planning.rewrite import rewritten
from trainfit.plans import OpDecision, Plan, Region, RegionKind
from trainfit.simulate import Timeline, simulate
from trainfit.store import content_hash
from trainfit.trace import Trace


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


def unplanned(trace: Trace, costs: CostTable, timeline: Timeline, step_seconds: float) -> Unplanned:
    """Return the step as it is; timeline and seconds are those of the trace."""
    return Unplanned(trace, costs, content_hash(trace), timeline.peak_bytes, step_seconds)


def certified(
    step: Unplanned, effects: Sequence[Effect], *, budget_bytes: int, bound_seconds: float, method: str
) -> tuple[Plan, Timeline]:
    """Replay regions on the trace; return the plan that promises what comes out, and its memory.

    `bound_seconds` is what any plan of this method adds to the step at least.
    """
    trace = step.trace
    new = rewritten(trace, effects) if effects else trace
    timeline = simulate(new)
    kinds: dict[RegionKind, int] = {}
    regions: list[Region] = []
    for effect in effects:
        kind = _decisions(trace, effect)
        regions.append(
            Region(
                module=trace.module_name(effect.region.module),
                call=_call_of_module(trace, effect.region.call),
                kind=kinds.setdefault(kind, len(kinds)),
                kept_bytes=effect.choice.bytes,
                recompute_seconds=effect.choice.seconds,
            )
        )
    step_seconds = schedule(new, step.costs).step_seconds
    plan = Plan(
        target=trace.target,
        device=step.costs.device.name,
        torch=trace.torch,
        trace_hash=step.trace_hash,
        budget_bytes=budget_bytes,
        kinds=tuple(kinds),
        regions=tuple(regions),
        peak_bytes=timeline.peak_bytes,
        step_seconds=step_seconds,
        baseline_peak_bytes=step.peak_bytes,
        baseline_step_seconds=step.step_seconds,
        # The solver adds seconds up; two queues can overlap a little more of them.
        bound_seconds=min(step.step_seconds + bound_seconds, step_seconds),
        method=method,
        world_size=step.world_size,
    )
    return plan, timeline


def _decisions(trace: Trace, effect: Effect) -> RegionKind:
    ops: list[OpDecision] = []
    for number in effect.region.ops:
        signature = trace.signatures[trace.ops[number].signature]
        shapes = tuple(spec.shape for spec in signature.outputs)
        ops.append(OpDecision(signature.name, shapes, effect.decision(number), signature.random))
    return RegionKind(tuple(ops))


def _call_of_module(trace: Trace, call_number: int) -> int:
    """Return which call of its module this is, not counting recomputation."""
    module = trace.calls[call_number].module
    return sum(1 for call in trace.calls[:call_number] if call.module == module and not call.recompute)
