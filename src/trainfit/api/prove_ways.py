"""`verify` of a way: all of its changes are made to the real step, which is measured and compared."""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.api.request import Request
from trainfit.basics.units import format_bytes
from trainfit.changes.change import StepChange
from trainfit.changes.kinds import changes_of
from trainfit.changes.step_with_changes import made_to, options_with
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.costs.schedule import schedule
from trainfit.devices.library_handles import library_workspaces
from trainfit.errors import PlanError
from trainfit.plans.way_store import load_way
from trainfit.plans.ways import Way
from trainfit.steps.step import Step
from trainfit.timing.load import LoadMeter
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace
from trainfit.verifying.measuring import TIMED_RUNS
from trainfit.verifying.verification import (
    Verification,
    guard_memory,
    needed_bytes_with,
    notes_on,
    said_of_real_runs,
)
from trainfit.verifying.way_verification import carry_out, run_way_for_real
from trainfit.workspace.measured import THOROUGH

_SAME = 0.01
"""A promise that is further than this from what the changed step needs here is about another step."""


def verify_way(
    request: Request, way: Way | str, *, force: bool, eager: bool, runs: int | None, meter: LoadMeter | None
) -> Verification:
    """Predict and measure the step with the way and without it, and compare their results.

    What is predicted is the changed step, captured for this machine. The way's own promise is for the device
    that it was made for.
    """
    way = load_way(way) if isinstance(way, str) else way
    device = request.device
    guard = None if force else lambda needed: guard_memory(device, {"the real step": needed})
    trace = request.trace(limits=THOROUGH, guard=guard)
    changed = _changed(request, way, trace)
    changed_trace = changed.trace(limits=THOROUGH, guard=guard)
    timeline = simulate(changed_trace)
    if not force:
        guard_memory(device, needed_bytes_with(simulate(trace), timeline.peak_bytes, "the way"))
    table = changed.price(changed_trace)
    measured, comparison = run_way_for_real(
        request.build,
        changed.build,
        way,
        device.kind,
        (trace, changed_trace),
        timed=runs or TIMED_RUNS,
        eager=eager,
        meter=meter,
    )
    request.watch.lap("measure")
    kept_bytes = sum(library.bytes for library in library_workspaces(changed_trace, device))
    said = said_of_real_runs(changed_trace.assumptions) + table.warnings + notes_on(measured, comparison)
    return Verification(
        target=trace.target,
        device=device,
        trace=changed_trace,
        predicted_peak_bytes=kept_bytes + timeline.peak_bytes,
        predicted_persistent_bytes=kept_bytes + timeline.persistent_bytes,
        predicted_seconds=schedule(changed_trace, table).step_seconds,
        measured=measured,
        warnings=_about_the_promise(way, device.name, timeline.peak_bytes) + said,
        comparison=comparison,
        seconds=request.watch.seconds,
    )


def _changed(request: Request, way: Way, trace: Trace) -> Request:
    """Return the request for the step with all changes of the way."""
    step = UnchangedStep(trace, request.device, request.resolved.kind, request.takes)
    offered = {change.name: change for change in changes_of(step)}
    own: list[StepChange] = []
    for made in way.changes:
        if made.by_apply or made.kind == "allocator":
            continue  # `apply` makes it; or it is a setting of the process, which a processor does not have
        if made.name not in offered:
            raise PlanError(
                f"{made.name} cannot be made to this step here. What can: {_listed(list(offered.values()))}."
            )
        own.append(offered[made.name])
    first = made_to(own)

    def change(step: Step) -> Step:
        return carry_out(step if first is None else first(step), way)

    return request.changed_by(options_with(request.options, own), change)


def _listed(changes: Sequence[StepChange]) -> str:
    return "; ".join(change.name for change in changes) or "nothing"


def _about_the_promise(way: Way, device: str, peak_bytes: int) -> tuple[str, ...]:
    """Say for what the way makes its promise, if that is not this step here."""
    if way.device == device and abs(way.peak_bytes - peak_bytes) <= _SAME * peak_bytes:
        return ()
    return (
        f"the way was made for {way.target} on {way.device}, and promises {format_bytes(way.peak_bytes)} "
        f"there; predicted here is this step on {device}, changed in the same way.",
    )
