"""What is advised, tried: the peak that is left is the one that a capture of the changed step has."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainfit
from trainfit.api import choose
from trainfit.api.request import Request
from trainfit.memory.advice import Advice, advice
from trainfit.traces.simulate import simulate


def build(device: str = "cpu", fused: bool | None = None, batch: int = 1) -> trainfit.Step:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    inputs = torch.randn(batch, 256, device=device)
    return trainfit.Step.of(model, inputs, loss=lambda y: y.square().mean(), optimizer=optimizer)


def advised(trace: trainfit.Trace) -> dict[str, Advice]:
    return {one.kind: one for one in advice(simulate(trace))}


def test_a_fused_kernel_leaves_what_was_computed() -> None:
    found = advised(trainfit.capture(build, device="h100"))["optimizer kernels"]
    fused = trainfit.capture(build, device="h100", options=trainfit.StepOptions(set={"fused": True}))
    # A fused kernel keeps its count of steps on the GPU: a block of the allocator's for each of 8 parameters.
    assert found.peak_bytes + 8 * 512 == simulate(fused).peak_bytes


@pytest.mark.parametrize("target", ["gpt2-tiny", "vit-tiny"])
def test_no_plan_gets_below_its_bound(target: str) -> None:
    trace = trainfit.capture(target, device="h100", options=trainfit.StepOptions(batch=8))
    smallest = choose.plan_step(Request(trace, "h100"), budget=1).plan.peak_bytes
    least = advised(trace)["plan"].peak_bytes
    assert least <= smallest < simulate(trace).peak_bytes
    assert smallest <= 1.25 * least  # and it is worth saying


def test_what_does_not_fit_says_so_in_a_message() -> None:
    with pytest.raises(trainfit.BudgetTooSmall) as error:
        trainfit.plan(build, device="h100", budget="1MiB")
    message = str(error.value)
    assert "What would lower it:" in message and "fused=True lets a plan get lower" in message
    assert "smaller batch" not in message  # activations are a few kilobytes here


def test_with_a_fused_kernel_plans_do_get_lower() -> None:
    """At a small batch the smallest plan is as large as the optimizer's temporaries make it."""
    traces = {
        optimizer: trainfit.capture(
            "vit-tiny", device="h100", options=trainfit.StepOptions(batch=1, optimizer=optimizer)
        )
        for optimizer in ("adamw-foreach", "adamw-fused")
    }
    smallest = {name: choose.plan_step(Request(trace, "h100"), budget=1) for name, trace in traces.items()}
    found = {one.kind: one for one in advice(smallest["adamw-foreach"].timeline, planned=True)}
    least = found["optimizer kernels"].peak_bytes
    assert least <= smallest["adamw-fused"].plan.peak_bytes < smallest["adamw-foreach"].plan.peak_bytes
