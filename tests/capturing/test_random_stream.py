"""Draws that are too large to be made are left out, whoever makes the tensor that they fill."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trainfit
from trainfit.api import request
from trainfit.capturing import random_stream
from trainfit.capturing.random_stream import seeded
from trainfit.targets import load
from trainfit.traces.simulate import simulate


@pytest.mark.parametrize("size", [100, 101])
def test_large_draws_are_left_out_also_of_what_makes_its_own_tensor(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.randn(...)` has no tensor among its arguments, and would allocate all of it."""
    monkeypatch.setattr(random_stream, "BUDGET_ELEMENTS", 100)
    with seeded():
        torch.randn(100)
        drawn = torch.default_generator.get_state()
    with seeded():
        before = torch.default_generator.get_state()
        stream = random_stream.RandomStream()
        stream.advance(torch.ops.aten.randn.default, ([size],), {}, [torch.empty(size)])
        after = torch.default_generator.get_state()
    assert torch.equal(after, drawn if size == 100 else before)


def test_a_batch_larger_than_this_machine_takes_no_memory() -> None:
    def build() -> trainfit.Step:
        model = nn.Linear(8, 8)
        return trainfit.Step.of(
            model,
            torch.randn(1 << 34, 8),
            loss=lambda output: output.sum(),
            optimizer=torch.optim.SGD(model.parameters()),
        )

    trace = trainfit.capture(build, device="h100")
    assert simulate(trace).peak_bytes > 1 << 39


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("preset", ["gpt2-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "resnet-tiny"])
def test_a_model_that_decides_nothing_by_draws_is_captured_the_same_without_them(
    preset: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = trainfit.StepOptions(batch=2, seq=None if preset[0] in "vr" else 32)
    without = trainfit.capture(preset, device=device, options=options)
    # As if it were a step of a user, which may decide by them.
    monkeypatch.setattr(request, "followed_if", lambda decides: random_stream.followed_if(True))
    assert trainfit.capture(preset, device=device, options=options) == without


def test_only_routers_of_built_in_models_decide_by_what_is_drawn() -> None:
    decide = {name: load(name, trainfit.StepOptions()).decides_by_draws for name in ("gpt2", "mixtral-tiny")}
    assert decide == {"gpt2": False, "mixtral-tiny": True}
