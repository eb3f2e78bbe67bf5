"""Stages of a pipeline: worked out from a step without stages, they are those that captures say."""

from __future__ import annotations

from dataclasses import replace

import pytest

import trainfit
from trainfit.allocator.named_options import named_options
from trainfit.costs.pipeline_times import pipeline_times
from trainfit.costs.schedule import schedule
from trainfit.devices.device_table import find_device
from trainfit.scaling.captures_ahead import CapturesAhead
from trainfit.scaling.mesh_candidates import Division, MeshSizes
from trainfit.scaling.mesh_judge import MeshJudge
from trainfit.scaling.one_forward_one_backward import StageSeconds, order_of, step_seconds
from trainfit.scaling.scale_question import ScaleQuestion, WantedCapture, depths_of
from trainfit.scaling.shape_captures import ShapeCaptures
from trainfit.traces.simulate import simulate

WIDE = {"layers": 8, "hidden": 2048, "heads": 16, "kv_heads": 16, "feed_forward": 8192, "vocab_size": 32000}
"""Wide enough that kernels, and not the host, decide how long it takes."""


@pytest.mark.parametrize(
    ("sizes", "micro_batches", "dtype"),
    [
        (MeshSizes(pp=2), 4, "bf16"),
        (MeshSizes(pp=4, fsdp=2), 6, "bf16"),
        (MeshSizes(pp=2, tp=2), 3, "bf16"),
        (MeshSizes(pp=2, replicate=2, fsdp=2), 4, "bf16-autocast"),
    ],
    ids=lambda value: value.words if isinstance(value, MeshSizes) else str(value),
)
def test_stages_are_those_that_captures_say(sizes: MeshSizes, micro_batches: int, dtype: str) -> None:
    options = trainfit.StepOptions(seq=8192, dtype=dtype, set=WIDE)
    question = ScaleQuestion("llama-tiny", find_device("h100"), options)
    request = question.request(WantedCapture(sizes, micro_batches))
    stages = request.stages(request.trace())
    assert len(stages) == sizes.pp
    truth = pipeline_times([schedule(one, request.price(one)) for one in stages])
    peaks = [simulate(one).peak_bytes for one in stages]
    depths, depth = depths_of(question)
    captures = ShapeCaptures(CapturesAhead(question), depths)
    captures.look_at(replace(sizes, pp=1, replicate=1))
    judge = MeshJudge(captures, depth, named_options("default"))
    found = judge.judge(sizes, Division(1, micro_batches))
    assert found is not None and found.stage_bytes is not None and found.recomputed_share == 0
    assert list(found.stage_bytes) == pytest.approx(peaks, rel=0.03)
    # The last stage has the most: it is exact but for rounding.
    assert found.stage_bytes[-1] == pytest.approx(peaks[-1], rel=0.002)
    assert found.seconds == pytest.approx(truth.step_seconds, rel=0.035)


def test_the_order_of_torch() -> None:
    # As `Schedule1F1B` has it: of three stages and four micro-batches.
    assert "".join(f"{what}{number}" for what, number in order_of(0, 3, 4)) == "F0F1F2B0F3B1B2B3"
    assert "".join(f"{what}{number}" for what, number in order_of(2, 3, 4)) == "F0B0F1B1F2B2F3B3"
    assert "".join(f"{what}{number}" for what, number in order_of(0, 4, 2)) == "F0F1B0B1"


def test_seconds_by_hand() -> None:
    alike = [StageSeconds(1.0, 2.0)] * 3
    # (stages - 1 + micro-batches) * (forward + backward), the well-known formula. The first stage begins the
    # next step when its own last backward is done, which is the last of all.
    assert step_seconds(alike, 4, 0.0) == pytest.approx((3 - 1 + 4) * 3.0)
    # One micro-batch passes through all stages, there and back, and is sent four times.
    assert step_seconds(alike, 1, 0.5) == pytest.approx(3 * 3.0 + 4 * 0.5)
    # The slowest stage decides: 4 * 6 of its own, beside one forward and backward of the other.
    uneven = [StageSeconds(1.0, 2.0), StageSeconds(2.0, 4.0)]
    assert step_seconds(uneven, 4, 0.0) == pytest.approx(1.0 + 4 * 6.0 + 2.0)
    # What comes before and after, and what is added to gradients that are there.
    once = [StageSeconds(1.0, 2.0, before=0.25, after=0.75, later_backward=0.1)]
    assert step_seconds(once, 3, 0.0) == pytest.approx(0.25 + 9.0 + 0.2 + 0.75)
