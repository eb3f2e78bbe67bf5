"""What Python shows of a result is one line, however large the step."""

from __future__ import annotations

import trainfit
from trainfit.api import choose
from trainfit.api.request import Request

OPTIONS = trainfit.StepOptions(batch=1, seq=32)


def test_results_are_one_line() -> None:
    trace = trainfit.capture("gpt2-tiny", device="h100", options=OPTIONS)
    estimate = trainfit.estimate(trace, device="h100")
    result = choose.plan_step(Request(trace, "h100"))
    frontier = trainfit.frontier(trace, device="h100", points=1)
    for value in (trace, estimate, estimate.timeline, estimate.costs, result, result.plan, frontier):
        assert "\n" not in repr(value) and 10 < len(repr(value)) < 200, repr(value)
    assert repr(estimate).startswith("<Estimate of gpt2-tiny on h100-sxm-80gb: peak ")
    assert ", fits, " in repr(estimate)
    assert len(repr(frontier.points[0])) < 400
