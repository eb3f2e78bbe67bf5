"""What is advised, tried: the peak that is left is the one that a capture of the changed step has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import trainfit
from trainfit.api import choose
from trainfit.api.request import Request
from trainfit.costs.estimates import Estimate
from trainfit.devices.device_table import find_device
from trainfit.memory.advice import Advice, advice
from trainfit.models.recipe import OptimizerName
from trainfit.traces.simulate import simulate

MODELS = (
    *(("gpt2", 8), ("gpt2-tiny", 8), ("llama-tiny", 8), ("bert-tiny", 8)),
    *(("vit-tiny", 32), ("resnet-18", 16), ("mixtral-tiny", 8)),
)
TOO_SMALL = replace(find_device("h100"), name="too-small", memory_bytes=1 << 20)


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


@pytest.mark.parametrize(("model", "batch"), MODELS)
def test_what_is_said_of_half_a_batch_and_of_bf16_is_what_captures_have(model: str, batch: int) -> None:
    """Half a batch: bytes from 1 % below to 4 % above, seconds within 1 %; bf16 is captured.

    What is off are workspaces of convolutions and sums, which are not quite as many as samples. bf16 that is
    derived misses casts to float32, in these models of the logits, and kernels that are others.
    """

    def captured(**options: Any) -> Estimate:
        # A device without memory: nothing fits, so that all advice is given.
        return trainfit.estimate(model, device=TOO_SMALL, options=trainfit.StepOptions(**options))

    step = captured(batch=batch)
    said = {one.kind: one for one in step.advice}
    half, narrow = captured(batch=batch // 2), captured(batch=batch, dtype="bf16")
    assert half.time is not None and narrow.time is not None
    assert 0.99 <= said["batch"].peak_bytes / half.peak_bytes <= 1.04
    assert said["batch"].step_seconds == pytest.approx(half.time.step_seconds, rel=0.01)
    # Captured again: the same figures.
    assert said["dtype"].certainty == "captured"
    assert said["dtype"].peak_bytes == narrow.peak_bytes
    assert said["dtype"].step_seconds == narrow.time.step_seconds
    # From the trace alone: of a step that no flag changes.
    derived = {one.kind: one for one in trainfit.estimate(step.trace, device=TOO_SMALL).advice}["dtype"]
    assert derived.certainty == "about" and derived.step_seconds is not None
    assert 0.6 <= derived.peak_bytes / narrow.peak_bytes <= 1.02
    assert 0.7 <= derived.step_seconds / narrow.time.step_seconds <= 1.3


@pytest.mark.parametrize(("model", "batch"), [("gpt2-tiny", 4), ("resnet-tiny", 16), ("bert-tiny", 2)])
def test_another_optimizer_takes_no_longer(model: str, batch: int) -> None:
    def captured(optimizer: OptimizerName) -> Estimate:
        options = trainfit.StepOptions(batch=batch, optimizer=optimizer)
        return trainfit.estimate(model, device="h100", options=options)

    foreach, fused, sgd = (captured(name) for name in ("adamw-foreach", "adamw-fused", "sgd"))
    said = {one.kind: one for one in foreach.advice}
    assert foreach.time is not None and fused.time is not None and sgd.time is not None
    assert said["optimizer state"].step_seconds == foreach.time.step_seconds >= sgd.time.step_seconds
    assert foreach.time.step_seconds >= fused.time.step_seconds


def test_a_function_of_ones_own_is_not_captured_again() -> None:
    """Nobody knows how to tell it to use bf16; a step that fits needs no advice."""
    found = {one.kind: one for one in trainfit.estimate(build, device=TOO_SMALL).advice}
    assert found["dtype"].certainty == "about"
    assert trainfit.estimate("gpt2-tiny", device="h100").sixteen_bits is None


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
