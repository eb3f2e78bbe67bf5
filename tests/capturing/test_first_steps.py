"""Where the first step makes what later steps find: optimizer state, gradients that are never dropped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn

import trainfit
from trainfit.allocator.training_steps import Request, TrainingSteps
from trainfit.traces.simulate import simulate


def most_alive(*parts: Iterable[Request]) -> int:
    """Add up the bytes that are allocated, and return the most of them; a block is freed once."""
    alive: dict[int, int] = {}
    most = 0
    for part in parts:
        for number, size in part:
            if size:
                assert number not in alive
                alive[number] = size
            else:
                del alive[number]
            most = max(most, sum(alive.values()))
    return most


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("at_the_beginning", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_later_steps_have_the_predicted_peak(
    optimizer: type[torch.optim.Optimizer], at_the_beginning: bool, set_to_none: bool
) -> None:
    def build() -> trainfit.Step:
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        how = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        chosen = optimizer(model.parameters(), lr=0.1, **how)  # type: ignore[call-arg]
        data = torch.randn(32, 64)

        def run() -> torch.Tensor:
            if at_the_beginning:
                chosen.zero_grad(set_to_none=set_to_none)
            loss = model(data).square().mean()
            loss.backward()
            chosen.step()
            if not at_the_beginning:
                chosen.zero_grad(set_to_none=set_to_none)
            return loss

        return trainfit.Step(model=model, optimizer=chosen, run=run)

    captured = trainfit.capture(build, device="a100-40gb")
    exact = replace(captured, device="cpu", observed_peak_bytes=None)  # so that nothing is rounded
    steps = TrainingSteps(captured)
    parts = [steps.before(), steps.first(), steps.next()]
    after_two = most_alive(*parts)
    assert after_two == simulate(exact).peak_bytes
    # Steps go on without a change: nothing is left over, nothing is freed twice.
    assert most_alive(*parts, steps.next(), steps.next()) == after_two
    states = [storage for storage in captured.storages if storage.category == "optimizer_state"]
    if optimizer is not torch.optim.Adagrad:  # whose state is there before the first step
        assert states and all(captured.ops[storage.born].phase == "optimizer" for storage in states)
