"""Calls of a region that do what one before did, or almost: compared op by op, and right in any case."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from planned_models import SUBJECTS, Outcome, Subject
from plans import Policy, recompute_everything, save_everything, save_products
from torch import nn

from trainfit.applying import applied
from trainfit.applying.courses import Courses
from trainfit.applying.quick_recording import QuickRecorder
from trainfit.applying.recording import RegionRecorder
from trainfit.capturing.random_stream import HostRandomState, seeded

Situation = dict[str, Any]
POLICIES = (recompute_everything, save_products, save_everything)
pytestmark = pytest.mark.filterwarnings("ignore:.*does not do what its plan says")


class Situated(nn.Module):
    """A module whose function sees what the test says of a call."""

    def __init__(
        self, function: Callable[[Any, torch.Tensor, Situation], torch.Tensor], now: Situation
    ) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.function = function
        self.now = [now]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x, self.now[0])


class Around(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.before, self.part = nn.Linear(6, 6), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.before(x)).sum()


def outcomes(
    function: Callable[[Any, torch.Tensor, Situation], torch.Tensor],
    situations: Sequence[Situation],
    policy: Policy | None,
) -> list[Outcome]:
    """Run one call after another, with regions or without, and return what each leaves behind."""
    first = situations[0]
    subject = Subject(lambda: Around(Situated(function, first)), lambda: torch.randn(4, 6), ("Around.part",))
    plan = None if policy is None else subject.plan(policy)
    model, inputs = subject.new()
    model.zero_grad()
    found: list[Outcome] = []

    def run() -> None:
        for situation in situations:
            model.part.now[0] = situation
            x = inputs[: situation.get("batch", 4)]
            loss = model(x.t().contiguous().t() if situation.get("turned") else x)
            loss.backward()
            gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
            found.append(Outcome(loss.detach(), gradients, {}, torch.get_rng_state()))
            model.zero_grad()

    with seeded():
        if plan is None:
            run()
        else:
            with applied(model, plan):
                run()
    return found


def assert_same(
    function: Callable[[Any, torch.Tensor, Situation], torch.Tensor], *situations: Situation
) -> None:
    expected = outcomes(function, situations, None)
    for policy in POLICIES:
        pairs = zip(expected, outcomes(function, situations, policy))
        assert [one.differences(other) for one, other in pairs] == [[] for _ in situations]


def described(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the operators that are described from here on."""
    found: list[str] = []
    original = RegionRecorder.handle

    def handle(self: Any, facts: Any, func: Any, args: Any, kwargs: Any) -> Any:
        found.append(str(func))
        return original(self, facts, func, args, kwargs)

    monkeypatch.setattr(RegionRecorder, "handle", handle)
    return found


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_call_like_one_before_is_not_described_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SUBJECTS[name]
    plan, (model, inputs) = subject.plan(save_products), subject.new()
    with applied(model, plan):
        for _ in range(2):
            subject.run(model, inputs).backward()
        found = described(monkeypatch)
        subject.run(model, inputs).backward()
    # What is made from nothing always is, and what writes to what was there before: the batches are counted.
    usual = {"aten.ones.default", "aten.scalar_tensor.default", "aten.empty.memory_format"}
    written = {"aten.add_.Tensor", "aten._batch_norm_with_update.default", "aten.mul_.Tensor"}
    assert set(found) <= usual | written


def test_blocks_with_the_same_decisions_share_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SUBJECTS["transformer"]
    plan, (model, inputs) = subject.plan(save_products), subject.new()
    assert len(plan.kinds) == 1 and len(plan.regions) == 2
    found = described(monkeypatch)
    with applied(model, plan):
        subject.run(model, inputs).backward()
    products = sum(op.name == "aten.addmm.default" for op in plan.kinds[0].ops)
    assert found.count("aten.addmm.default") == products == 4


def test_courses_that_part_are_both_known(monkeypatch: pytest.MonkeyPatch) -> None:
    # The same operators, on other tensors: both are in the plan.
    def function(module: Any, x: torch.Tensor, now: Situation) -> torch.Tensor:
        a, b = module.linear(x).sin(), module.other(x).cos()
        return (a if now["first"] else b).exp() * a

    one, other = {"first": True}, {"first": False}
    outcomes(function, [one, other], save_products)
    counts = []
    for calls in ([one, other], [one, other, one, other, other, one]):
        with monkeypatch.context() as patch:
            found = described(patch)
            outcomes(function, calls, save_products)
            counts.append(len(found))
    assert counts[0] == counts[1]


def test_the_same_ops_on_other_tensors() -> None:
    def function(module: Any, x: torch.Tensor, now: Situation) -> torch.Tensor:
        a, b = module.linear(x).sin(), module.other(x).cos()
        one, other = (b, a) if now["swapped"] else (a, b)
        return (one.exp() * x) + other.tanh() * one

    kept, swapped = {"swapped": False}, {"swapped": True}
    assert_same(function, kept, swapped, kept, swapped, swapped)


def test_a_weight_in_the_place_of_another() -> None:
    def function(module: Any, x: torch.Tensor, now: Situation) -> torch.Tensor:
        h = module.linear(x).sin()
        return (module.other if now["other"] else module.linear)(h).cos() * h

    assert_same(function, {"other": True}, {"other": False}, {"other": True})


def test_a_number_in_the_place_of_a_tensor() -> None:
    def function(module: Any, x: torch.Tensor, now: Situation) -> torch.Tensor:
        h = module.linear(x).sin()
        return (h * (2.0 if now["number"] else module.other.bias)).exp()

    assert_same(function, {"number": True}, {"number": False}, {"number": True})


def test_batches_of_other_sizes_and_layouts() -> None:
    def function(module: Any, x: torch.Tensor, now: Situation) -> torch.Tensor:
        h = F.gelu(module.linear(x))
        return torch.cat([h, h.sin()], 1).view(-1, 6).mul(x.repeat(2, 1)).exp()

    situations = [{}, {"batch": 2}, {"batch": 3}, {}, {"turned": True}, {"batch": 3, "turned": True}, {}]
    assert_same(function, *situations)


def test_results_whose_sizes_depend_on_more_than_the_inputs() -> None:
    def function(module: Any, x: torch.Tensor, now: Situation) -> torch.Tensor:
        h = module.linear(x).sin()
        return (h[:, : now["length"]] * 2.0).exp().sum() + module.other(h).cos()

    assert_same(function, *({"length": length} for length in (3, 5, 3, 1, 6)))


def test_another_dtype_and_evaluation_in_between() -> None:
    def function(module: Any, x: torch.Tensor, now: Situation) -> torch.Tensor:
        h = F.dropout(module.linear(x).to(now["dtype"]), 0.3, training=now["training"])
        return (h.sin() * h).float()

    single, half = torch.float32, torch.bfloat16
    training = {"dtype": half, "training": True}
    assert_same(
        function, training, {"dtype": half, "training": False}, training, {"dtype": single, "training": True}
    )


def test_autocast_with_and_without_its_cache() -> None:
    def function(module: Any, x: torch.Tensor, now: Situation) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=now["cast"]):
            h = module.linear(x).sin()
            return (module.linear(h) * module.other(h)).float()

    assert_same(function, {"cast": True}, {"cast": True}, {"cast": False}, {"cast": True})


def test_an_error_that_the_module_catches() -> None:
    def function(module: Any, x: torch.Tensor, now: Situation) -> torch.Tensor:
        h = module.linear(x).sin()
        if now["fails"]:
            with contextlib.suppress(RuntimeError):
                h = torch.mm(h, module.other.weight[:5])
        return module.other(h).cos() * h

    assert_same(function, {"fails": False}, {"fails": True}, {"fails": False}, {"fails": True})


def test_a_weight_that_is_changed_between_forward_and_backward_is_still_noticed() -> None:
    def function(module: Any, x: torch.Tensor, now: Situation) -> torch.Tensor:
        return module.other(module.linear(x).sin()).cos()

    subject = Subject(lambda: Around(Situated(function, {})), lambda: torch.randn(4, 6), ("Around.part",))
    plan, (model, inputs) = subject.plan(recompute_everything), subject.new()
    with applied(model, plan):
        for _ in range(3):
            model(inputs).backward()
            with torch.no_grad():
                model.part.linear.weight.add_(1.0)
        loss = model(inputs)
        with torch.no_grad():
            model.part.linear.weight.add_(1.0)
        with pytest.raises(RuntimeError, match="needs to run again was modified in place"):
            loss.backward()


def test_a_kept_result_that_is_written_to_after_the_region() -> None:
    # Kept results are returned themselves: a write to one must not go unnoticed, nor be counted twice.
    def function(module: Any, x: torch.Tensor, now: Situation) -> torch.Tensor:
        h = module.linear(x)
        g = module.other(h).add_(1.0).relu_()
        return h.sin() * g

    assert_same(function, {}, {}, {})


def test_graphs_that_are_kept_run_backward_twice() -> None:
    def function(module: Any, x: torch.Tensor, now: Situation) -> torch.Tensor:
        return module.other(module.linear(x).sin()).cos()

    subject = Subject(lambda: Around(Situated(function, {})), lambda: torch.randn(4, 6), ("Around.part",))
    plan, (model, inputs) = subject.plan(save_products), subject.new()
    with applied(model, plan):
        for _ in range(2):
            model.zero_grad()
            loss = model(inputs)
            loss.backward(retain_graph=True)
            once = model.part.linear.weight.grad.clone()
            loss.backward()
            assert torch.equal(model.part.linear.weight.grad, once * 2)


def test_a_model_that_never_does_the_same_is_not_remembered_for_ever() -> None:
    def function(module: Any, x: torch.Tensor, now: Situation) -> torch.Tensor:
        h = module.linear(x)
        for bit in f"{now['number']:07b}":
            h = h.sin() if bit == "1" else h.cos()
        return h

    known: list[Courses] = []
    original = QuickRecorder.__init__

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        known.append(args[3])
        original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuickRecorder, "__init__", remember)
        situations = [{"number": number} for number in range(8)]
        with pytest.warns(UserWarning, match="does not do what its plan says"):
            result = outcomes(function, situations, save_products)
    assert [a.differences(b) for a, b in zip(outcomes(function, situations, None), result)] == [[]] * 8
    # What is not in the plan is kept, and not learnt.
    assert len({id(each) for each in known}) == 1 and len(known[0]._known) <= 2


# Generators of the host -----------------------------------------------------------------------------------


def test_a_normal_number_that_was_drawn_in_advance_is_drawn_again() -> None:
    def function(module: Any, x: torch.Tensor, now: Situation) -> torch.Tensor:
        return (module.linear(x).sin() * numpy.random.normal() * random.gauss(0.0, 1.0)).exp()

    assert_same(function, {}, {}, {}, {})


@pytest.mark.parametrize("draw", [numpy.random.normal, lambda: random.gauss(0.0, 1.0), random.random])
def test_every_draw_changes_the_state(draw: Callable[[], Any]) -> None:
    with seeded():
        for _ in range(700):
            before = HostRandomState()
            assert before.is_present() and HostRandomState().same_as(before)
            first = draw()
            assert not before.is_present()
            before.restore()
            assert before.is_present() and draw() == first
