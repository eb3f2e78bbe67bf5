"""Regions that keep nothing: followed once, then left to torch, unless they do more than compute."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from planned_models import CONVOLUTIONS, TRANSFORMER, Outcome, Subject, Transformer, outcome
from plans import as_a_whole
from torch import nn

from trainfit.applying import applied, apply
from trainfit.applying.plain_checkpoint import PlainCheckpoint
from trainfit.applying.region import RegionCall
from trainfit.capturing.random_stream import seeded
from trainfit.plans.plan import Plan


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """How each region call was run."""
    found: list[str] = []
    for kind, name in ((RegionCall, "followed"), (PlainCheckpoint, "whole")):
        original: Callable[..., Any] = kind.run

        def run(self: Any, *args: Any, original: Any = original, name: str = name) -> Any:
            found.append(name)
            return original(self, *args)

        monkeypatch.setattr(kind, "run", run)
    yield found


class Part(nn.Module):
    """A module of two weights, a buffer and a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.0)
        self.register_buffer("seen", torch.zeros(6))
        self.function, self.calls, self.noted = function, 0, [0]

    def forward(self, x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        h = self.second(self.function(self, self.first(x), *others, **named).tanh()).exp()
        return x + self.dropout(h)


class Model(nn.Module):
    def __init__(self, part: nn.Module, arguments: Callable[[torch.Tensor], tuple[Any, ...]]) -> None:
        super().__init__()
        self.before, self.part, self.arguments = nn.Linear(6, 6), part, arguments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.before(x), *self.arguments(x)).square().mean()


def subject(
    function: Callable[..., Any], arguments: Callable[[torch.Tensor], tuple[Any, ...]] = lambda x: ()
) -> Subject:
    return Subject(lambda: Model(Part(function), arguments), lambda: torch.randn(4, 6), ("Model.part",))


def only_computes(part: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.sin().relu_()


def counts_its_calls(part: Any, x: torch.Tensor) -> torch.Tensor:
    part.calls += 1
    return x * part.calls


def notes_in_a_list(part: Any, x: torch.Tensor) -> torch.Tensor:
    part.noted.append(len(part.noted))
    return x * len(part.noted)


def writes_a_buffer(part: Any, x: torch.Tensor) -> torch.Tensor:
    part.seen += x.detach().mean(0)
    return x + part.seen


def draws_in_python(part: Any, x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


OWN = torch.Generator().manual_seed(3)


def draws_from_its_own(part: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(x.shape, generator=OWN)


def reads_a_value(part: Any, x: torch.Tensor) -> torch.Tensor:
    return x.sin() if x.sum().item() > 0 else x.cos()


def reads_a_list(part: Any, x: torch.Tensor) -> torch.Tensor:
    return x * sum(x.detach().flatten().tolist())


def trained(model: nn.Module, inputs: torch.Tensor, steps: int = 4) -> Outcome:
    OWN.manual_seed(3)
    return outcome(model, lambda: model(inputs), steps)


def both(of: Subject, plan: Plan | None = None, steps: int = 4) -> list[Outcome]:
    """Train without and with a plan."""
    found = []
    plan = of.plan(as_a_whole) if plan is None else plan
    for used in (None, plan):
        model, inputs = of.new()
        if used is not None:
            apply(model, used)
        found.append(trained(model, inputs, steps))
    return found


def after_two_steps(of: Subject) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield a model that has been trained for two steps without a plan, and one with."""
    for plan in (None, of.plan(as_a_whole)):
        model, inputs = of.new()
        if plan is not None:
            apply(model, plan)
        trained(model, inputs, steps=2)
        yield model, inputs


def test_after_the_first_step_torch_does_it_alone(calls: list[str]) -> None:
    without, planned = both(TRANSFORMER)
    assert without.differences(planned) == []
    assert calls == ["followed"] * 2 + ["whole"] * 6


@pytest.mark.parametrize(
    "function",
    [
        counts_its_calls,
        notes_in_a_list,
        writes_a_buffer,
        draws_in_python,
        draws_from_its_own,
        reads_a_value,
        reads_a_list,
    ],
)
def test_what_does_more_than_compute_is_followed_each_time(
    calls: list[str], function: Callable[..., Any]
) -> None:
    without, planned = both(subject(function))
    assert without.differences(planned) == []
    assert calls == ["followed"] * 4


def test_what_only_computes_is_followed_once(calls: list[str]) -> None:
    without, planned = both(subject(only_computes))
    assert without.differences(planned) == []
    assert calls == ["followed"] + ["whole"] * 3


SOMETIMES: list[bool] = []


def counts_sometimes(part: Any, x: torch.Tensor) -> torch.Tensor:
    if SOMETIMES:
        part.calls += 1
    return x * (1 + part.calls)


def test_an_attribute_that_is_set_only_later(calls: list[str]) -> None:
    outcomes = []
    for model, inputs in after_two_steps(subject(counts_sometimes)):
        SOMETIMES.append(True)
        try:
            outcomes.append(trained(model, inputs, steps=3))
        finally:
            SOMETIMES.clear()
        assert model.part.calls == 3
    assert outcomes[0].differences(outcomes[1]) == []
    assert calls == ["followed", "whole", "whole", "followed", "followed"]


def draws_if_large(part: Any, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.dropout(x, 0.5) if x.abs().max().item() > 100 else x


@pytest.mark.filterwarnings("ignore:.*does not do what its plan says")
def test_a_value_that_leads_to_a_draw_only_later() -> None:
    outcomes = []
    for model, inputs in after_two_steps(subject(draws_if_large)):
        outcomes.append(trained(model, inputs * 1e4, steps=1))
    assert outcomes[0].differences(outcomes[1]) == []


def test_batch_norm_is_followed_each_time(calls: list[str]) -> None:
    without, planned = both(CONVOLUTIONS)
    assert without.differences(planned) == []
    assert "whole" not in calls


class Anything:
    """An object whose content is unknown."""

    scale = 2.0


@pytest.mark.parametrize(
    ("arguments", "whole"),
    [
        (lambda x: (None, 3, "text", torch.float32, (x, [x, {"a": x}])), True),
        (lambda x: (Anything(),), False),
        (lambda x: ({1, 2},), False),
    ],
)
def test_arguments_that_say_what_they_are(calls: list[str], arguments: Any, whole: bool) -> None:
    without, planned = both(subject(only_computes, arguments))
    assert without.differences(planned) == []
    assert calls == ["followed", *["whole" if whole else "followed"] * 3]


def test_a_number_that_grows_is_no_kind_of_call(calls: list[str]) -> None:
    count = iter(range(1000))
    of = subject(lambda part, x, number: x * 2, lambda x: (next(count),))
    model, inputs = of.new()
    with applied(model, of.plan(as_a_whole)):
        trained(model, inputs, steps=30)
        forward: Any = vars(model.part)["forward"]
        assert set(calls) == {"followed"} and len(calls) == 30
        assert len(forward._known[0]._known) == 16


@pytest.mark.filterwarnings("ignore:the plan was made for smaller inputs")
def test_another_shape_is_followed_once(calls: list[str]) -> None:
    model, inputs = Subject(Transformer, lambda: torch.randint(0, 20, (3, 6)), ()).new()
    with applied(model, TRANSFORMER.plan(as_a_whole)):
        for size in (2, 2, 3, 3, 2):
            model(inputs[:size]).backward()
    assert calls == [how for how in ("followed", "whole", "followed", "whole", "whole") for _ in range(2)]


@pytest.mark.filterwarnings("ignore:.*does not do what its plan says")
def test_attributes_that_change_are_noticed(calls: list[str]) -> None:
    outcomes = []
    for model, inputs in after_two_steps(subject(only_computes)):
        # Now it draws random numbers, which it did not before, and which the plan does not have.
        model.part.dropout.p = 0.5
        outcomes.append(trained(model, inputs, steps=3))
    assert outcomes[0].differences(outcomes[1]) == []
    assert calls == ["followed", "whole", "followed", "followed", "followed"]


def test_hooks_inside_see_values(calls: list[str]) -> None:
    found: list[list[torch.Tensor]] = []
    for model, inputs in after_two_steps(TRANSFORMER):
        seen: list[torch.Tensor] = []
        model.blocks[0].up.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out))
        trained(model, inputs, steps=1)
        found.append(seen)
    assert len(found[0]) == 1 and found[1] and all(torch.equal(found[0][0], other) for other in found[1])
    assert calls[4:] == ["followed", "whole"]


def test_no_gradients_and_evaluation(calls: list[str]) -> None:
    model, inputs = TRANSFORMER.new()
    with applied(model, TRANSFORMER.plan(as_a_whole)):
        trained(model, inputs, steps=2)
        with torch.no_grad():
            model(inputs)
        assert len(calls) == 4
        model.eval()
        # Without dropout it is another computation; that is no mistake, and what it does is kept.
        trained(model, inputs, steps=1)
        assert calls[4:] == ["followed"] * 2


def test_two_backwards(calls: list[str]) -> None:
    gradients = []
    for model, inputs in after_two_steps(TRANSFORMER):
        with seeded():
            loss = model(inputs)
        loss.backward(retain_graph=True)
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients))
    assert calls[-1] == "whole"


def test_copies_and_pickles_learn_for_themselves(calls: list[str]) -> None:
    model, inputs = TRANSFORMER.new()
    apply(model, TRANSFORMER.plan(as_a_whole))
    trained(model, inputs, steps=2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        calls.clear()
        trained(other, inputs, steps=2)
        assert calls == ["followed"] * 2 + ["whole"] * 2


def ready(of: Subject) -> tuple[Any, torch.Tensor]:
    _, planned = after_two_steps(of)
    return planned


def test_a_weight_that_is_modified_before_backward() -> None:
    model, inputs = ready(TRANSFORMER)
    loss = model(inputs)
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"shape \[64, 16\].*blocks.0 reads was modified in place between"):
        loss.backward()


def test_an_input_that_is_modified_before_backward() -> None:
    model, inputs = ready(TRANSFORMER)
    kept: list[torch.Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    loss = model(inputs)
    with torch.no_grad():
        kept[0].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified in place between forward and backward"):
        loss.backward()


WRITES: list[bool] = []


def writes_a_buffer_sometimes(part: Any, x: torch.Tensor) -> torch.Tensor:
    if WRITES:
        part.seen += 1
    return x + part.seen


def test_a_buffer_that_is_written_only_later() -> None:
    """It could be read before, so it cannot be recomputed: an error, not another gradient."""
    model, inputs = ready(subject(writes_a_buffer_sometimes))
    WRITES.append(True)
    try:
        with pytest.raises(RuntimeError, match="by itself, which it did not do before"):
            model(inputs)
    finally:
        WRITES.clear()


@pytest.mark.parametrize("first", [True, False])
def test_arguments_that_are_never_looked_at_are_not_held(first: bool) -> None:
    of = subject(only_computes, lambda x: (torch.ones(1000), [torch.ones(1000)]))
    model, inputs = of.new() if first else ready(of)
    if first:
        apply(model, of.plan(as_a_whole))
    alive: list[Any] = []
    original = model.arguments

    def arguments(x: torch.Tensor) -> tuple[Any, ...]:
        first, (second,) = original(x)
        alive.extend(torch.utils.weak.WeakTensorKeyDictionary({tensor: 1}) for tensor in (first, second))
        return first, [second]

    model.arguments = arguments
    loss = model(inputs)
    assert [len(each) for each in alive] == [0, 0]
    loss.backward()


def test_autocast(calls: list[str]) -> None:
    def run(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = model(inputs)
        return loss

    of = Subject(Transformer, TRANSFORMER.inputs, TRANSFORMER.regions, run)
    outcomes = []
    for plan in (None, of.plan(as_a_whole)):
        model, inputs = of.new()
        if plan is not None:
            apply(model, plan)
        outcomes.append(outcome(model, lambda: run(model, inputs), 3))  # noqa: B023
    assert outcomes[0].differences(outcomes[1]) == []
    assert calls == ["followed"] * 2 + ["whole"] * 4
