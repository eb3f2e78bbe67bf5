"""What a model may do that is hard to compute again: the results stay right, or there is a clear error."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from planned_models import TRANSFORMER, Subject, assert_same_with, outcome
from plans import Policy, as_a_whole, plan_for, recompute_everything, save_everything, save_products
from torch import nn

from trainfit.applying import applied
from trainfit.applying.execution import execution

POLICIES = (recompute_everything, as_a_whole, save_products, save_everything)


class Around(nn.Module):
    """A module called `part` between two others, so that its input and output have a history."""

    def __init__(self, part: nn.Module, after: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.before, self.part = nn.Linear(6, 6), part
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.part(self.before(x)))


def around(make_part: Callable[[], nn.Module], after: Callable[[Any], torch.Tensor] = torch.sum) -> Subject:
    return Subject(lambda: Around(make_part(), after), lambda: torch.randn(4, 6), ("Around.part",))


def assert_same(subject: Subject, policies: tuple[Policy, ...] = POLICIES) -> None:
    trace = subject.trace()
    for policy in policies:
        assert_same_with(subject, plan_for(trace, subject.regions, policy), steps=2)


class Part(nn.Module):
    """A module of a weight and a function, for tests that need one."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.ones(6))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def part(function: Callable[[Any, torch.Tensor], Any], after: Any = torch.sum) -> Subject:
    return around(lambda: Part(function), after)


# Other shapes, other ops ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the plan was made for smaller inputs")
@pytest.mark.parametrize("policy", POLICIES)
def test_another_batch_size_follows_the_same_decisions(policy: Policy) -> None:
    plan = TRANSFORMER.plan(policy)
    larger = Subject(TRANSFORMER.make, lambda: torch.randint(0, 20, (5, 9)), TRANSFORMER.regions)
    assert_same_with(larger, plan)


def with_branch(branch: list[str]) -> Subject:
    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        h = module.linear(x).tanh()
        if branch[0] == "other":
            h = h.sin() * h.cos()
        if branch[0] == "short":
            return h
        return module.linear(h.exp()).sigmoid()

    return part(function)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("other", "op 3 is aten.sin.default, where the plan has aten.exp.default"),
        ("short", "it ended after 3 of 7 ops"),
    ],
)
def test_another_branch_warns_once_and_stays_right(policy: Policy, other: str, says: str) -> None:
    branch = ["usual"]
    subject = with_branch(branch)
    plan = subject.plan(policy)
    model, inputs = subject.new()
    branch[0] = other
    expected = outcome(model, lambda: model(inputs), steps=3)
    with applied(model, plan), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert expected.differences(outcome(model, lambda: model(inputs), steps=3)) == []
    assert [str(warning.message).split(": ")[1].split(". ")[0] for warning in caught] == [says]
    assert "Around.part does not do what its plan says" in str(caught[0].message)


def test_something_else_in_backward_is_an_error() -> None:
    another = [False]

    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        h = module.linear(x)
        return (h.sin() if another[0] else h.exp()).exp()

    subject = part(function)
    plan = subject.plan(recompute_everything)
    model, inputs = subject.new()
    with applied(model, plan):
        loss = model(inputs)
        another[0] = True
        with pytest.raises(RuntimeError, match=r"Around\.part did something else .* was aten\.exp\.default"):
            loss.backward()


# In-place writes ------------------------------------------------------------------------------------------


def test_a_region_that_writes_to_its_own_input() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True))

    assert_same(around(make))

    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        before = x * 2.0
        x.add_(1.0)
        return module.linear(x).exp() + before.sin()

    assert_same(part(function))


def test_a_region_that_writes_to_its_own_buffer_after_reading_it() -> None:
    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        h = module.linear(x) + module.seen
        with torch.no_grad():
            module.seen.mul_(0.9).add_(h.mean(0), alpha=0.1)
        h = (h.exp() + module.seen).tanh()
        module.seen.data.sub_(0.01)
        return h * h.sin()

    assert_same(part(function))


def test_a_buffer_that_is_overwritten_after_the_region_and_needed_again_is_an_error() -> None:
    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            module.seen.add_(1.0)
        return (module.linear(x) * module.seen).exp()

    subject = part(function)
    assert_same(subject)
    plan = subject.plan(recompute_everything)
    model, inputs = subject.new()
    with applied(model, plan):
        loss = model(inputs)
        with torch.no_grad():
            model.part.seen.add_(1.0)
        with pytest.raises(RuntimeError, match=r"shape \[6\] that Around\.part writes to and needs"):
            loss.backward()


def test_statistics_are_updated_once() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=0.3), nn.Tanh(), nn.BatchNorm1d(6))

    assert_same(around(make))
    images = Subject(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True, affine=True)
        ),
        lambda: torch.randn(2, 3, 6, 6),
        ("Sequential",),
        lambda model, inputs: model(inputs).square().mean(),
    )
    assert_same(images)


def test_a_kept_result_that_is_overwritten_after_the_region() -> None:
    subject = part(lambda module, x: module.linear(x.sin()).cos() * 2.0, lambda y: y.mul_(3.0).exp().sum())
    assert_same(subject, (recompute_everything, save_products))
    model, inputs = subject.new()
    expected = outcome(model, lambda: model(inputs), steps=2)

    def save_the_last(signature: Any, number: int) -> bool:
        return signature.name == "aten.mul.Tensor"

    # The kept result is needed by nothing, so nothing has to be done about it.
    with applied(model, subject.plan(save_the_last)):
        assert expected.differences(outcome(model, lambda: model(inputs), steps=2)) == []


def test_a_needed_kept_result_that_is_overwritten_after_the_region() -> None:
    def after(result: Any) -> torch.Tensor:
        result[0].zero_()
        return result[1]

    subject = part(lambda module, x: (h := x.detach() * 2.0, (module.linear(h).exp() * x.sin()).sum()), after)

    # Without a plan torch refuses this: the weight's gradient needs what was overwritten.
    model, inputs = subject.new()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(inputs).backward()

    def save_double(signature: Any, number: int) -> bool:
        return signature.name == "aten.mul.Tensor"

    trace_subject = part(
        lambda module, x: (h := x.detach() * 2.0, (module.linear(h).exp() * x.sin()).sum()), lambda r: r[1]
    )
    warns = pytest.warns(UserWarning, match="modified in place after the region")
    with applied(model, trace_subject.plan(save_double)), warns:
        model(inputs).backward()
    assert model.part.linear.weight.grad is not None


def test_an_input_that_is_overwritten_before_backward_is_an_error() -> None:
    kept: list[torch.Tensor] = []

    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        kept[:] = [x]
        return module.linear(x).exp()

    subject = part(function)
    plan = subject.plan(recompute_everything)
    model, inputs = subject.new()
    with applied(model, plan):
        loss = model(inputs)
        kept[0].data += 1  # which torch does not count
        with torch.no_grad():
            kept[0].add_(1)
        with pytest.raises(RuntimeError, match=r"an input of Around\.part, of shape \[4, 6\], was modified"):
            loss.backward()


def test_an_input_that_is_overwritten_but_not_needed_again() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4, inplace=True), nn.ReLU(inplace=True))

    subject = Subject(make, lambda: torch.randn(4, 6), ("Sequential.1",), lambda m, x: m(x).exp().sum())
    assert_same(subject)


def test_a_weight_that_is_overwritten_before_backward_is_an_error() -> None:
    subject = part(lambda module, x: module.linear(x).exp())
    plan = subject.plan(recompute_everything)
    model, inputs = subject.new()
    with applied(model, plan):
        loss = model(inputs)
        with torch.no_grad():
            model.part.linear.bias.add_(1)
        with pytest.raises(RuntimeError, match=r"shape \[6\] that aten\.addmm\.default in Around\.part"):
            loss.backward()


# Backward in pieces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_backward_in_two_parts(policy: Policy) -> None:
    def two(module: Any, x: torch.Tensor) -> Any:
        h = F.dropout(module.linear(x).tanh(), 0.5)
        return h.exp(), h.sin()

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part(two)

        def forward(self, x: torch.Tensor) -> Any:
            first, second = self.part(x)
            return first.sum(), second.detach().requires_grad_().square().sum(), second

    def run(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        first, _, second = model(inputs)
        (gradient,) = torch.autograd.grad(first, model.part.linear.weight, retain_graph=True)
        return (second * second).sum() + gradient.detach().sum()

    assert_same_with(
        (subject := Subject(Losses, lambda: torch.randn(4, 6), ("Losses.part",), run)), subject.plan(policy)
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_two_backwards_over_different_parts_of_a_region(policy: Policy) -> None:
    def two(module: Any, x: torch.Tensor) -> Any:
        return F.dropout(module.linear(x).exp(), 0.5).sum(), F.dropout(
            module.linear(x.sin()).tanh(), 0.5
        ).sum()

    subject = around(lambda: Part(two), lambda pair: pair[0] + pair[1])
    plan = subject.plan(policy)

    def gradients(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(0)
        losses = model.part(inputs)
        for loss in losses:
            loss.backward()
        return [model.part.linear.weight.grad.clone(), model.part.linear.bias.grad.clone()]

    expected = gradients(*subject.new())
    model, inputs = subject.new()
    with applied(model, plan):
        assert all(map(torch.equal, expected, gradients(model, inputs)))


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_inside_of_a_region(policy: Policy) -> None:
    def forces(module: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            place = x.detach().requires_grad_() if not x.requires_grad else x
            energy = F.dropout(module.linear(place).tanh(), 0.2).square().sum()
            (force,) = torch.autograd.grad(energy, place, create_graph=True)
        return energy + force.square().sum()

    subject = part(forces)
    model, inputs = subject.new()
    expected = outcome(model, lambda: model(inputs))
    with applied(model, subject.plan(policy)), warnings.catch_warnings():
        # Backward takes other ops while a mode is active than in the trace, which models a run without.
        warnings.simplefilter("ignore")
        assert expected.differences(outcome(model, lambda: model(inputs))) == []


# Values, and what is made without an operator -------------------------------------------------------------


def test_decisions_by_value() -> None:
    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        h = module.linear(x)
        large = h.detach().abs().sum(0)
        order = large.argsort().tolist()
        for place in order[: int(large.max().item() > 0) + 2]:
            h = h + h[:, place : place + 1].sin()
        if (large.numpy() > 0).all():
            h = h.exp()
        return h * float(numpy.asarray(large.mean()))

    model = part(function)
    assert_same_with_ignored_warnings(model)


def assert_same_with_ignored_warnings(subject: Subject) -> None:
    """The capture assumes values that it does not know, so the real run may take another way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(subject)


def test_constants_made_inside_of_a_region() -> None:
    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        scale = torch.from_numpy(numpy.full(6, 3.0, numpy.float32))
        scale.mul_(2.0)
        shift = torch.tensor([1.0] * 6)
        shift += 0.5
        h = module.linear(x) * scale + shift
        return h.sin() * h

    assert_same(part(function))


def test_memory_that_is_filled_without_an_operator() -> None:
    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        h = module.linear(x)
        copied = torch.empty_like(h)
        copied.numpy()[:] = 2.0 * h.detach().numpy()
        return (h * copied).sin().exp()

    subject = part(function)
    plain = part(lambda module, x: (h := module.linear(x), (h * torch.empty_like(h)).sin().exp())[1])
    model, inputs = subject.new()
    expected = outcome(model, lambda: model(inputs))
    with applied(model, plain.plan(recompute_everything)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert expected.differences(outcome(model, lambda: model(inputs))) == []


def test_a_generator_of_its_own() -> None:
    generator = torch.Generator()

    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x.shape, generator=generator)
        mask = torch.empty_like(x).bernoulli_(0.5, generator=generator)
        return (module.linear(x) * noise + mask).sin() * torch.rand_like(x)

    def run(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        generator.manual_seed(3)
        first = model(inputs)
        return first + model(inputs * 2)

    subject = part(function)
    subject = Subject(subject.make, subject.inputs, subject.regions, run)
    plan = plan_for(part(function).trace(), subject.regions, recompute_everything)
    assert_same_with(subject, plan)


def test_draws_of_python_and_numpy() -> None:
    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        h = module.linear(x) * random.random()
        return (h.sin() + float(numpy.random.rand())).exp().square()

    assert_same(part(function))


class Doubled(torch.autograd.Function):
    """Writes to its input, saves its output, and keeps a tensor in its own way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        x.mul_(2.0)
        squared = x.square()
        ctx.save_for_backward(x, squared)
        ctx.shape = torch.tensor(x.shape)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, squared = ctx.saved_tensors
        return gradient * 2.0 + (x - squared) * int(ctx.shape[0])


def test_a_custom_function() -> None:
    assert_same(part(lambda module, x: Doubled.apply(module.linear(x).sin()).exp()))  # type: ignore[no-untyped-call]


def test_complex_and_integer_tensors() -> None:
    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(module.linear(x))
        turned = torch.view_as_real(spectrum.conj() * spectrum.abs())
        order = x.argsort(dim=1)
        return torch.fft.irfft(torch.view_as_complex(turned), n=6).gather(1, order).sin()

    assert_same(part(function))


def test_recurrent_layers() -> None:
    assert_same(around(lambda: nn.GRU(6, 6), lambda result: result[0].sum() + result[1].square().sum()))


# Errors leave nothing behind ------------------------------------------------------------------------------


def test_an_error_inside_of_a_region_leaves_nothing_behind() -> None:
    fails = [False]

    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        h = module.linear(x).exp()
        if fails[0]:
            raise ZeroDivisionError
        return h * h

    subject = part(function)
    plan = subject.plan(save_products)
    model, inputs = subject.new()
    expected = outcome(model, lambda: model(inputs))
    tolist = torch.Tensor.tolist
    with applied(model, plan):
        fails[0] = True
        with pytest.raises(ZeroDivisionError):
            model(inputs)
        fails[0] = False
        assert (execution.regions, execution.level, execution.on_value_read) == (0, 0, None)
        assert torch.Tensor.tolist is tolist
        assert expected.differences(outcome(model, lambda: model(inputs))) == []


def test_two_threads_with_two_models() -> None:
    subject = part(lambda module, x: F.gelu(module.linear(x)).sin())
    plan = subject.plan(save_products)
    gradients: list[torch.Tensor] = []

    def work() -> None:
        model, inputs = Around(Part(lambda m, x: F.gelu(m.linear(x)).sin()), torch.sum), torch.ones(4, 6)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        with applied(model, plan):
            for _ in range(20):
                model(inputs).backward()
        gradients.append(model.before.weight.grad)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(gradients) == 2 and torch.equal(*gradients)
