"""What a storage is called, when the step replaces the tensors that it began with."""

from __future__ import annotations

import pytest
import torch
from captured_steps import captured
from torch import nn

from trainfit.steps.step import Step

pytestmark = pytest.mark.usefixtures("little_garbage")

BYTES = 4 * (16 * 16 + 16)
"""Of all parameters of the model below."""


def build_with(optimizer_class: type[torch.optim.Optimizer], *, zero_first: bool = False) -> Step:
    model = nn.Linear(16, 16)
    optimizer = optimizer_class(model.parameters())
    inputs = torch.randn(4, 16)

    def run() -> torch.Tensor:
        if zero_first:
            optimizer.zero_grad()
        loss = model(inputs).sum()
        loss.backward()
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


class ReplacesParameters(torch.optim.Optimizer):
    """Assigns to `.data`, as momentum encoders and SAM do."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad


class ReplacesState(torch.optim.Optimizer):
    """Keeps a pair of new tensors after each step, as optimizers with quantised state do."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            first, second = self.state[parameter].get("moments", (0.0, 0.0))
            self.state[parameter]["moments"] = (parameter.grad + first, parameter.grad**2 + second)


def test_gradients_that_the_step_begins_by_dropping_are_gradients() -> None:
    trace = captured(lambda: build_with(torch.optim.SGD, zero_first=True))
    before = [s for s in trace.storages if s.persistent and s.category == "gradient"]
    assert sum(s.bytes for s in before) == BYTES


def test_parameters_that_the_step_replaces_are_parameters_before_and_after() -> None:
    trace = captured(lambda: build_with(ReplacesParameters))
    parameters = [s for s in trace.storages if s.category == "parameter"]
    assert sum(s.bytes for s in parameters if s.persistent) == BYTES
    assert sum(s.bytes for s in parameters if s.end is None) == BYTES


def test_optimizer_state_that_the_step_replaces_is_state_before_and_after() -> None:
    trace = captured(lambda: build_with(ReplacesState))
    state = [s for s in trace.storages if s.category == "optimizer_state"]
    assert sum(s.bytes for s in state if s.persistent) == 2 * BYTES
    assert sum(s.bytes for s in state if s.end is None) == 2 * BYTES


class Wrapping(torch.optim.Optimizer):
    """Leaves the work to another optimizer, which the step does not name."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1, momentum=0.9)

    def step(self, closure: object = None) -> None:
        self.inner.step()


def test_state_of_an_optimizer_inside_of_another_is_optimizer_state() -> None:
    trace = captured(lambda: build_with(Wrapping))
    state = [s for s in trace.storages if s.category == "optimizer_state"]
    assert sum(s.bytes for s in state if s.persistent) == BYTES
