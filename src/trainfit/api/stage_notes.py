"""What plans say about a stage of a pipeline: its times are its own, and what all stages take."""

from __future__ import annotations

from trainfit.api.request import Request
from trainfit.basics.units import format_seconds
from trainfit.costs.pipeline_times import is_pipeline, pipeline_times
from trainfit.costs.schedule import Schedule, schedule
from trainfit.traces.trace import Trace


def stage_notes(request: Request, trace: Trace, planned: Schedule | None = None) -> tuple[str, ...]:
    """Say that times are those of one stage, without its waiting for others; nothing if there are no stages.

    With a planned step, also how long all stages take with the plan on this one, and without.
    """
    if not is_pipeline(trace):
        return ()
    own = "one stage of a pipeline: seconds are the stage's own, without what it waits for others"
    stages = request.stages(trace) if planned is not None else ()
    if planned is None or not stages:
        return (f"{own}; `trainfit estimate` with the same --mesh has the step of all stages.",)
    without = [schedule(one, request.price(one)) for one in stages]
    changed = [planned if one is trace else times for one, times in zip(stages, without)]
    before, after = (format_seconds(pipeline_times(times).step_seconds) for times in (without, changed))
    return (
        f"{own}. A step of all {len(stages)} stages takes {before} without plans and {after} with this plan "
        "on this stage; every other stage needs its own plan (--rank).",
    )
