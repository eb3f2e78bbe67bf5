"""Every difference that a plan could make is found; what was not compared is not called equal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainfit.plans.plan import Plan
from trainfit.steps.step import Step
from trainfit.verifying.plan_comparison import SameResults, compare_results

NO_REGIONS = Plan(
    target="test",
    device="cpu",
    torch=torch.__version__,
    trace_hash="",
    budget_bytes=0,
    kinds=(),
    regions=(),
    peak_bytes=0,
    memory_bytes=0,
    step_seconds=0.0,
    baseline_peak_bytes=0,
    baseline_step_seconds=0.0,
    bound_seconds=0.0,
)
"""A plan that changes nothing; so every difference is one that the test has made."""


class Net(nn.Module):
    """Has a parameter of each sort, and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4, sparse=True)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.norm(self.words(words)))
        return out.square().mean()


def compared(
    returns: Callable[[torch.Tensor, bool], Any] = lambda loss, is_second: loss,
    after_backward: Callable[[Net, bool], None] = lambda model, is_second: None,
    before: Callable[[Net, bool], None] = lambda model, is_second: None,
) -> SameResults:
    """Compare a step with itself, but for what these do: they are told whether it is the second run."""
    builds = 0

    def build() -> Step:
        nonlocal builds
        builds += 1
        is_second = builds == 2
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        words = torch.randint(0, 8, (6,))
        before(model, is_second)

        def run() -> Any:
            loss = model(words)
            loss.backward()
            after_backward(model, is_second)
            optimizer.step()
            optimizer.zero_grad()
            return returns(loss.detach(), is_second)

        return Step(model, optimizer, run)

    result = compare_results(build, NO_REGIONS)
    # Where something differs, the step runs without the plan again, to see whether that is the plan's doing.
    assert builds == result.runs == (4 if result.differences else 2)
    return result


def test_the_same_step_is_equal() -> None:
    result = compared()
    assert result.loss.equal is result.gradients.equal is result.state.equal is True
    assert result.differences == result.not_compared == ()
    assert result.gradients.compared == 2 + 2 + 2  # indices and values of the embedding; norm; out
    assert result.gradient_scale > 0


LOSSES: dict[str, Callable[[torch.Tensor, bool], Any]] = {
    "tensor": lambda loss, is_second: loss + 1e-7 * is_second + 1.0,
    "float": lambda loss, is_second: loss.item() + is_second,
    "in a dict": lambda loss, is_second: {"loss": loss + is_second, "step": 1},
    "in a tuple": lambda loss, is_second: (1, loss.item() + is_second),
    "NaN against 0": lambda loss, is_second: loss * math.nan if is_second else loss * 0.0,
    "0 against NaN": lambda loss, is_second: loss * 0.0 if is_second else loss * math.nan,
    "NaN against a number": lambda loss, is_second: loss * math.nan if is_second else loss,
    "float, NaN against 0": lambda loss, is_second: math.nan if is_second else 0.0,
    "another kind": lambda loss, is_second: loss.item() if is_second else loss,
}


@pytest.mark.parametrize("name", LOSSES)
def test_another_loss_is_found(name: str) -> None:
    result = compared(returns=LOSSES[name])
    assert result.loss.equal is False and result.gradients.equal is True
    assert result.differences[0].startswith("result")


def test_a_step_that_returns_nothing_has_no_equal_loss() -> None:
    assert compared(returns=lambda loss, is_second: None).loss.equal is None
    result = compared(returns=lambda loss, is_second: object())
    assert result.loss.equal is None and result.not_compared == ("result (object)",)


def spoil(model: Net, value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(gradient: torch.Tensor) -> torch.Tensor:
        changed = gradient.clone()
        changed.flatten()[3] = value
        return changed

    return change


@pytest.mark.parametrize("value", [math.nan, 0.0, 12.5, math.inf])
def test_one_element_of_one_gradient_is_found(value: float) -> None:
    def before(model: Net, is_second: bool) -> None:
        if is_second:
            model.out.weight.register_hook(spoil(model, value))

    result = compared(before=before)
    assert result.gradients.equal is False and result.state.equal is False
    assert len(result.gradients.differences) == 1
    assert result.gradients.differences[0].startswith("out.weight: 1 of 8 elements, the first at [0, 3]: ")
    assert math.isfinite(result.gradients.largest_difference) == math.isfinite(value)


def test_nan_against_zero_in_a_gradient_is_found() -> None:
    def before(model: Net, is_second: bool) -> None:
        model.out.weight.register_hook(spoil(model, math.nan if is_second else 0.0))

    result = compared(before=before)
    assert result.gradients.differences == ("out.weight: 1 of 8 elements, the first at [0, 3]: 0.0 and nan",)


def test_the_same_nan_in_a_gradient_is_equal() -> None:
    def before(model: Net, is_second: bool) -> None:
        model.out.weight.register_hook(spoil(model, math.nan))

    result = compared(before=before)
    assert result.gradients.equal is result.state.equal is True


@pytest.mark.parametrize("with_gradient", [True, False])
def test_a_gradient_that_only_one_run_has_is_found(with_gradient: bool) -> None:
    def after_backward(model: Net, is_second: bool) -> None:
        if is_second is with_gradient:
            model.unused.grad = torch.zeros(3)

    result = compared(after_backward=after_backward)
    run = "planned" if with_gradient else "unplanned"
    assert result.gradients.differences == (f"unused: only in the {run} run",)


def test_a_change_of_the_parameters_alone_is_found() -> None:
    def after_backward(model: Net, is_second: bool) -> None:
        if is_second:
            with torch.no_grad():
                model.unused[1] += 1.0

    result = compared(after_backward=after_backward)
    assert result.gradients.equal is True
    assert result.state.differences == ("unused: 1 of 3 elements, the first at [1]: 1.0 and 2.0",)


def test_batch_statistics_that_were_counted_twice_are_found() -> None:
    def before(model: Net, is_second: bool) -> None:
        if is_second:
            model.norm.num_batches_tracked += 1

    result = compared(before=before)
    assert result.loss.equal is result.gradients.equal is True
    assert result.state.differences == ("norm.num_batches_tracked: 1.0 and 2.0",)


def test_gradients_of_a_model_that_only_an_optimizer_knows() -> None:
    """GIVEN a GAN whose step names its generator, THEN the discriminator's gradients are compared as well."""
    builds = 0

    def build() -> Step:
        nonlocal builds
        builds += 1
        generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, discriminator)]
        factor = 2.0 if builds == 2 else 1.0
        discriminator.bias.register_hook(lambda gradient: gradient * factor)

        def run() -> torch.Tensor:
            loss = discriminator(generator(torch.randn(3, 4))).sum()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        return Step(generator, optimizers, run)

    result = compare_results(build, NO_REGIONS)
    assert result.gradients.compared == 4
    assert [line.partition(":")[0] for line in result.differences] == 2 * [
        "optimizer 1, group 0, parameter 1"
    ]


def test_gradients_that_are_used_up_in_backward_are_compared() -> None:
    """GIVEN an optimizer that steps in backward and drops each gradient, THEN it is compared before that."""
    builds = 0

    def build() -> Step:
        nonlocal builds
        builds += 1
        model = nn.Linear(4, 4)
        factor = 2.0 if builds == 2 else 1.0

        def step_and_drop(parameter: torch.Tensor) -> None:
            with torch.no_grad():
                parameter -= 0.0 * parameter.grad
            parameter.grad = None

        model.weight.register_hook(lambda gradient: gradient * factor)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step_and_drop)

        def run() -> None:
            model(torch.randn(3, 4)).sum().backward()

        return Step(model, None, run)

    result = compare_results(build, NO_REGIONS)
    assert result.gradients.compared == 2 and result.state.equal is True
    assert [line.partition(":")[0] for line in result.differences] == ["weight"]


def test_gradients_that_the_step_sets_itself_are_compared() -> None:
    builds = 0

    def build() -> Step:
        nonlocal builds
        builds += 1
        model = nn.Linear(4, 1, dtype=torch.complex64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        factor = math.nan if builds == 2 else 1.0

        def run() -> None:
            loss = model(torch.randn(3, 4, dtype=torch.complex64)).abs().sum()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter.grad = gradient
            model.bias.grad = gradients[1] * factor
            optimizer.step()
            optimizer.zero_grad()

        return Step(model, optimizer, run)

    result = compare_results(build, NO_REGIONS)
    assert result.gradients.compared == 2
    assert [line.partition(":")[0] for line in result.gradients.differences] == ["bias"]
    assert result.gradients.largest_difference == math.inf


def test_without_any_gradient_they_are_not_called_equal() -> None:
    def build() -> Step:
        model = nn.Linear(4, 1)

        def run() -> torch.Tensor:
            loss = model(torch.randn(3, 4)).sum()
            torch.autograd.grad(loss, list(model.parameters()))
            return loss

        return Step(model, None, run)

    result = compare_results(build, NO_REGIONS)
    assert result.gradients.equal is None and result.loss.equal is True


def returning(result: Callable[[torch.Tensor], Any], data: Callable[[], float] = lambda: 0.0) -> SameResults:
    """Compare a step that returns this, on data to which that is added, and that the plan does not change."""

    def build() -> Step:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(3, 4)

        def run() -> Any:
            loss = model(x + data()).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return result(loss.detach())

        return Step(model, optimizer, run)

    return compare_results(build, NO_REGIONS)


@pytest.mark.parametrize("batches", [2, 3, 1000])
def test_data_that_goes_on_from_run_to_run_is_not_the_plans_doing(batches: int) -> None:
    """GIVEN data that is not made anew by `build`, THEN nothing is called equal, and nothing is blamed."""
    numbers = itertools.cycle(range(batches))
    result = returning(lambda loss: loss, data=lambda: float(next(numbers)))
    assert result.loss.equal is result.gradients.equal is result.state.equal is None
    assert result.differences == ()
    assert result.runs == (4 if batches == 2 else 3)
    told = [line.partition(" (")[0] for line in result.not_compared]
    names = ("result", "bias", "bias", "weight", "weight")
    assert sorted(told) == sorted(f"{name}: two runs without the plan differ too" for name in names)


def test_a_clock_in_the_result_is_not_the_plans_doing() -> None:
    clock = itertools.count()
    result = returning(lambda loss: {"loss": loss, "t": float(next(clock))})
    assert result.loss.equal is None and result.gradients.equal is result.state.equal is True
    assert result.not_compared == ("result['t']: two runs without the plan differ too (0.0 and 2.0)",)
    assert result.runs == 3


def test_what_only_the_plan_changes_is_found_beside_a_clock() -> None:
    clock, runs = itertools.count(), itertools.count()
    result = returning(lambda loss: {"loss": loss + (next(runs) == 1), "t": float(next(clock))})
    assert result.loss.equal is False
    assert [line.partition(":")[0] for line in result.differences] == ["result['loss']"]
    assert [line.partition(":")[0] for line in result.not_compared] == ["result['t']"]
