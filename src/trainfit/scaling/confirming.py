"""The winner of a world size captured whole, and its plan certified by the replay.

Of a pipeline the stage that needs the most is captured; how long stages wait for each other is worked out all
the same, as no stage's own step says it. Gradients that wait for further micro-batches are set aside from the
budget, and what is repeated for each of them is counted as often.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainfit.allocator.allocator_options import AllocatorOptions
from trainfit.api.choose import plan_step
from trainfit.api.predict import estimate_step
from trainfit.api.request import Request
from trainfit.basics.doing import as_part_of
from trainfit.costs.schedule import Schedule, schedule
from trainfit.plans.plan import Plan
from trainfit.scaling.captures_ahead import CapturesAhead
from trainfit.scaling.depth_figures import figures_of
from trainfit.scaling.mesh_judge import Judged
from trainfit.scaling.scale_question import WantedCapture
from trainfit.traces.simulate import Timeline
from trainfit.traces.trace import Trace


@dataclass(frozen=True)
class Confirmed:
    """A mesh as a capture of the whole model says it is."""

    judged: Judged
    """With the figures of the capture."""
    plan: Plan | None
    """What makes it fit; None if it fits as it is, or not at all."""
    trace: Trace
    warnings: tuple[str, ...]


def whole_step(found: Judged) -> WantedCapture:
    """Return the capture that confirms a mesh."""
    staged, division = found.sizes.pp > 1, found.division
    return WantedCapture(found.sizes, division.accumulation if staged else division.micro_batch, worst=staged)


def confirmed(
    captures: CapturesAhead,
    found: Judged,
    allocator: AllocatorOptions | None,
    budget: int | None,
    seconds_limit: float,
) -> Confirmed:
    """Capture the whole model over a mesh, and plan it if it has to be."""
    sizes, division = found.sizes, found.division
    staged, device = sizes.pp > 1, captures.question.device
    with as_part_of(f"confirming {sizes.words}"):
        trace = captures.trace(whole_step(found))
        again = Request(trace, device, allocator=allocator)
        answer = estimate_step(again)
        assert answer.costs is not None, "the device has a speed"
        times = schedule(trace, answer.costs)
        waiting = 0
        if division.accumulation > 1 and not staged:
            waiting = int(figures_of(answer.timeline, times, 0.0).gradient_bytes)
        available = device.default_budget_bytes if budget is None else budget
        memory, plan, timeline = answer.smallest_memory_bytes + waiting, None, answer.timeline
        warnings = trace.warnings
        if memory > available:
            result = plan_step(
                Request(trace, device, allocator=allocator), available - waiting, seconds_limit
            )
            warnings = result.warnings
            memory = result.plan.memory_bytes + waiting
            if result.feasible:
                plan, times, timeline = result.plan, result.times, result.timeline
    parts = found.parts if staged else _parts(found, timeline, times, plan)
    share = found.recomputed_share if staged else 0.0 if plan is None else _share(plan)
    judged = replace(found, memory_bytes=memory, budget_bytes=available, parts=parts, recomputed_share=share)
    return Confirmed(judged, plan, trace, warnings)


def _parts(found: Judged, timeline: Timeline, times: Schedule, plan: Plan | None) -> dict[str, float]:
    """Return what the step's seconds consist of, as the capture has them."""
    own, often = figures_of(timeline, times, 0.0), found.division.accumulation
    parts = dict.fromkeys(found.parts, 0.0)
    host = min(own.waiting_seconds, own.pass_seconds)
    again = plan.added_seconds if plan is not None else 0.0
    compute = max(own.pass_seconds - host - again - own.exposed_seconds, 0.0)
    named = {"compute": compute, "recompute": again, "host": host, **own.exposed}
    whole = sum(named.values())
    scale = own.pass_seconds / whole if whole else 0.0
    parts |= {name: often * seconds * scale for name, seconds in named.items()}
    return parts | {"optimizer": own.optimizer_seconds}


def _share(plan: Plan) -> float:
    """Return a share that says that some is recomputed: how much, the plan itself says."""
    return 0.5 if plan.regions else 0.0
