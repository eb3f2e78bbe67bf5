"""Several blocks as one region: one input held for all, the same results, and the promised memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import trainfit
from trainfit import Step
from trainfit.costs.roofline import roofline_costs
from trainfit.devices.device_table import find_device
from trainfit.planning.certify import Certified
from trainfit.planning.planner import Planner
from trainfit.traces.simulate import simulate

H100 = find_device("h100")
PRICES = replace(H100, name="the prices of an H100")
"""For steps on any device: a plan for an H100 itself is not for a CPU, and says so when it runs there."""


class Block(nn.Module):
    """Takes a mask by name, returns a tuple, drops out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor, *, mask: torch.Tensor) -> tuple[torch.Tensor, None]:
        inner = torch.nn.functional.gelu(self.up(self.norm(hidden)))
        return hidden + self.drop(self.down(inner)) * mask, None


class Net(nn.Module):
    """Eight blocks; `between` may change what one hands to the next."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.layers = nn.ModuleList(Block(32) for _ in range(8))
        self.between = between

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        mask = torch.ones(inputs.shape[0], 1, device=inputs.device)
        for layer in self.layers:
            hidden, _ = layer(hidden, mask=mask)
            if self.between is not None:
                hidden = self.between(hidden)
        loss: torch.Tensor = hidden.square().mean()
        return loss


def step_of(device: str = "cpu", between: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Step:
    torch.manual_seed(0)
    model = Net(between).to(device)
    return Step.of(model, (torch.randn(512, 16, device=device),), optimizer=None)


def plan_of_rows(device: str, length: int) -> tuple[Planner, Certified]:
    """Return the plan that checkpoints all rows of this length, keeping as little as possible."""
    trace = trainfit.capture(lambda: step_of(device), device="cpu" if device == "cpu" else H100)
    planner = Planner(trace, roofline_costs(trace, PRICES), allocator=None)
    chosen: dict[int, int] = {}
    for number, option in enumerate(planner.problem.options):
        if len(option.effects[0].region.calls) == length:
            chosen.setdefault(option.region, number)
    return planner, planner.certified(list(chosen.values()), 0, 0.0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("length", [2, 4])
def test_rows_promise_what_capture_sees(device: str, length: int) -> None:
    planner, found = plan_of_rows(device, length)
    plan = found.plan
    assert [region.continues for region in plan.regions] == ([False] + [True] * (length - 1)) * (8 // length)

    def planned() -> Step:
        step = step_of(device)
        trainfit.apply(step.model, plan)
        return step

    again = trainfit.capture(planned, device="cpu" if device == "cpu" else H100)
    assert simulate(again).peak_bytes == plan.peak_bytes < planner.step.peak_bytes


def test_rows_hold_fewer_inputs_than_blocks() -> None:
    """Between forward and backward, one input of four is left."""
    held = {length: plan_of_rows("cpu", length) for length in (1, 4)}
    at_the_turn = {}
    for length, (_, found) in held.items():
        timeline = found.timeline
        turn = next(n for n, op in enumerate(timeline.trace.ops) if op.phase == "backward")
        at_the_turn[length] = int(timeline.live_bytes[turn])
    one_input = 512 * 32 * 4
    assert at_the_turn[1] - at_the_turn[4] >= 5 * one_input


def trained(model: nn.Module, *, autocast: bool = False) -> list[torch.Tensor]:
    """Return the loss and the gradients of two batches, one added to the other."""
    torch.manual_seed(1)
    inputs = torch.arange(512 * 16).reshape(512, 16).float().sin()
    for batch in (inputs, inputs.flip(0)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch)
        loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected))


@pytest.mark.parametrize("length", [2, 4])
def test_results_are_the_same(length: int) -> None:
    plan = plan_of_rows("cpu", length)[1].plan
    model = trainfit.apply(step_of().model, plan)
    assert_equal(trained(model), trained(step_of().model))


@pytest.mark.filterwarnings("ignore:.*does not do what its plan says")
def test_results_are_the_same_with_autocast() -> None:
    """The plan was made without it, so that casts are not in it: what it does not cover is kept."""
    plan = plan_of_rows("cpu", 4)[1].plan
    model = trainfit.apply(step_of().model, plan)
    assert_equal(trained(model, autocast=True), trained(step_of().model, autocast=True))


def test_a_change_between_the_blocks_is_noticed() -> None:
    """Then each block holds its own input, with one warning."""
    plan = plan_of_rows("cpu", 4)[1].plan
    expected = trained(step_of(between=lambda hidden: hidden * 2).model)
    model = trainfit.apply(step_of(between=lambda hidden: hidden * 2).model, plan)
    with pytest.warns(UserWarning, match="its input is not what the region before it returned"):
        found = trained(model)
    assert_equal(found, expected)


def test_a_row_whose_first_block_is_missing_holds_its_input() -> None:
    """Somebody has taken a region out of the plan."""
    plan = plan_of_rows("cpu", 2)[1].plan
    step = step_of()
    trainfit.apply(step.model, replace(plan, regions=plan.regions[1:]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step.run()
    assert len(caught) == 1
