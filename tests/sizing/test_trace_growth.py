"""Traces that are worked out, beside those that are captured: number by number the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import trainfit
from trainfit.api.request import Request
from trainfit.api.size_judge import SizeJudge, SizeQuestion
from trainfit.sizing.size_results import SizeName
from trainfit.sizing.trace_growth import TraceGrowth, lagrange
from trainfit.traces.trace import Trace


def test_numbers_lie_on_a_line_or_a_parabola() -> None:
    assert lagrange((2, 4), 10)([7, 11]) == 23  # 3 + 2 x
    assert lagrange((1, 2, 4), 10)([3, 9, 33]) == 201  # 1 + 2 x^2
    assert lagrange((2, 4), 1_000_000)([5, 5]) == 5
    # Rounded up, as a division by two of 2, 4 and 7 is: 1, 2, 4.
    assert lagrange((2, 4), 7)([1, 2]) == 4


def whole(trace: Trace) -> dict[str, Any]:
    """Return everything that questions about memory read, op by op.

    FLOPs and bytes moved are left out: those of an embedding lie on no line where its tokens are as many as
    its rows. On a CPU workspaces are measured, and lie on no line either.
    """
    left_out: dict[str, Any] = {"flops": 0, "moved_bytes": 0}
    if trace.device == "cpu":
        left_out |= {"workspace_bytes": 0, "workspace_source": ""}
    return {
        "ops": [replace(op, signature=0) for op in trace.ops],
        "signatures": [replace(trace.signatures[op.signature], **left_out) for op in trace.ops],
        "storages": trace.storages,
        "calls": trace.calls,
        "counts": (trace.samples, trace.tokens),
        "settings": trace.settings,
    }


CASES: list[tuple[str, SizeName, tuple[int, ...], int, str]] = [
    ("gpt2-tiny", "batch", (2, 4), 37, "t4"),
    ("bert-tiny", "batch", (2, 4), 21, "h100"),
    ("resnet-tiny", "batch", (2, 4), 50, "a100-40gb"),
    ("vit-tiny", "batch", (2, 4), 9, "rtx-4090"),
    ("llama-tiny", "seq", (64, 128, 256), 1011, "h100"),
    ("mixtral-tiny", "seq", (32, 64, 128), 500, "t4"),
    ("gpt2-tiny", "batch", (2, 4), 6, "cpu"),
]


@pytest.mark.parametrize(("target", "name", "known", "size", "device"), CASES)
def test_what_is_worked_out_is_what_is_captured(
    target: str, name: SizeName, known: tuple[int, ...], size: int, device: str
) -> None:
    judge = SizeJudge(Request(target, device), SizeQuestion(name))
    for one in known:
        judge.capture(one)
    guessed = judge.guessed_trace(size)
    captured = trainfit.capture(target, device=device, options=trainfit.StepOptions(**{name: size}))  # type: ignore[arg-type]
    assert guessed is not None
    guessed.check()
    ours, theirs = whole(guessed), whole(captured)
    for part in ours:
        assert ours[part] == theirs[part], part
    if device != "cpu":
        predicted, found = (step_seconds(trace, device) for trace in (guessed, captured))
        assert predicted == pytest.approx(found, rel=0.01)


def step_seconds(trace: Trace, device: str) -> float:
    time = trainfit.estimate(trace, device=device).time
    assert time is not None
    return time.step_seconds


def test_traces_of_another_course_say_nothing() -> None:
    growth = TraceGrowth("batch")
    options = trainfit.StepOptions(batch=2)
    growth.learn(2, trainfit.capture("gpt2-tiny", device="t4", options=options))
    assert growth.at(8) is None  # one is no line
    growth.learn(4, trainfit.capture("bert-tiny", device="t4", options=replace(options, batch=4)))
    assert growth.at(8) is None
    assert not growth.is_flat
