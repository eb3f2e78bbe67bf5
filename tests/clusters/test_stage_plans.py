"""Plans and sizes of one stage of a pipeline: no time is said to be the step's that is not."""

from __future__ import annotations

import trainfit
from trainfit.api.choose import plan_step
from trainfit.api.request import Request
from trainfit.basics.units import format_seconds
from trainfit.costs.pipeline_times import pipeline_times
from trainfit.costs.schedule import schedule

OPTIONS = trainfit.StepOptions(batch=4, seq=256, dtype="bf16")
CLUSTER = trainfit.Cluster(world_size=2, mesh=(("pp", 2),))


def test_a_plan_says_what_all_stages_take() -> None:
    whole = trainfit.estimate("llama-tiny", device="h100", options=OPTIONS, cluster=CLUSTER)
    request = Request("llama-tiny", "h100", OPTIONS, cluster=CLUSTER, allocator=None)
    result = plan_step(request, whole.peak_bytes - (1 << 20), 5.0)
    assert result.plan.regions
    [note] = [text for text in result.warnings if "one stage of a pipeline" in text]
    assert whole.time is not None
    assert f"takes {format_seconds(whole.time.step_seconds)} without plans" in note
    stages = request.stages(result.trace)
    planned = pipeline_times([result.times, schedule(stages[1], request.price(stages[1]))])
    assert f"and {format_seconds(planned.step_seconds)} with this plan" in note
    assert planned.step_seconds >= whole.time.step_seconds


def test_sizes_have_no_rates_of_one_stage() -> None:
    options = trainfit.StepOptions(seq=256)
    found = trainfit.max_batch("llama-tiny", device="t4", options=options, cluster=CLUSTER, budget="200MiB")
    assert found.size >= 2
    assert all(row.samples_per_second is None for row in found.rows)
    alone = trainfit.max_batch("llama-tiny", device="t4", options=options, budget="200MiB")
    assert all(row.samples_per_second for row in alone.rows)
