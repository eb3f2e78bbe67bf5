"""What Python code changes while a region runs is changed once, as without a plan."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from planned_models import Subject, assert_same_with, outcome
from plans import as_a_whole, plan_for, recompute_everything, save_everything, save_products
from torch import nn

from trainfit.applying import applied
from trainfit.applying.python_objects import LastAttributes, ModuleAttributes, copy_structure

POLICIES = (recompute_everything, as_a_whole, save_products, save_everything)


def assert_same(subject: Subject) -> None:
    trace = subject.trace()
    for policy in POLICIES:
        assert_same_with(subject, plan_for(trace, subject.regions, policy), steps=3)


class Cache:
    """Grows as the layers of a model put keys into it, as those of language models do."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}
        self.lengths: list[int] = []

    def update(self, layer: int, key: torch.Tensor) -> torch.Tensor:
        if layer in self.keys:
            key = torch.cat([self.keys[layer], key])
        self.keys[layer] = key
        self.lengths.append(len(key))
        return key


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(6, 6), number

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        assert cache is not None
        keys = cache.update(self.number, self.linear(x).tanh())
        return x + (keys.exp() @ keys.sin().T).mean() * x


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache=cache)
        assert cache.lengths == [4, 4, 4]
        return x.sum() + sum(key.sum() for key in cache.keys.values())


CACHED = Subject(WithCache, lambda: torch.randn(4, 6), tuple(f"WithCache.layers.{n}" for n in range(3)))


def test_a_cache_that_layers_put_their_keys_into() -> None:
    assert_same(CACHED)


def test_keys_of_other_layers_are_not_held() -> None:
    """Each layer was passed the cache with all keys before its own, which its own backward does not need."""
    model, inputs = CACHED.new()
    found: list[Any] = []

    def look(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found.append(torch.utils.weak.WeakTensorKeyDictionary({kwargs["cache"].keys[layer.number]: 1}))

    with applied(model, CACHED.plan(recompute_everything)):
        for layer in model.layers:
            layer.register_forward_hook(look, with_kwargs=True)
        cache = Cache()
        x = inputs
        for layer in model.layers:
            x = layer(x, cache=cache)
        del cache
        assert [len(each) for each in found] == [0, 0, 0]
        x.sum().backward()


class Stateful(nn.Module):
    """Counts its calls, replaces a buffer, and collects losses in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("average", torch.ones(6))
        self.calls = 0
        self.losses: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x) * (1 + self.calls % 2)
        self.calls += 1
        self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)
        self.losses.append(h.square().mean())
        self.last = h
        return (h * self.average).exp().sin()


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Stateful()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.part.losses.clear()
        y = self.part(self.part(x))
        return y.sum() + sum(self.part.losses)


def test_a_module_that_changes_its_own_attributes() -> None:
    subject = Subject(Losses, lambda: torch.randn(4, 6), ("Losses.part",))
    assert_same(subject)
    model, inputs = subject.new()
    with applied(model, subject.plan(recompute_everything)):
        model(inputs).backward()
    assert (model.part.calls, len(model.part.losses)) == (2, 2)
    assert "last" in vars(model.part) and model.part.last.abs().sum() > 0


def test_hooks_inside_of_a_region_see_true_values() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x).exp().sum()

    subject = Subject(Outer, lambda: torch.randn(4, 6), ("Outer.part",))
    model, inputs = subject.new()
    seen: list[torch.Tensor] = []
    model.part[2].register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    for policy in POLICIES:
        with applied(model, subject.plan(policy)):
            seen.clear()
            model(inputs).backward()
        assert len(seen) == 2 and torch.equal(*seen)


def test_a_result_that_code_outside_keeps_in_backward_is_warned_of() -> None:
    kept: list[torch.Tensor] = []

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.linear(x)
            kept.append((h * 2.0).detach() + 1.0)
            return h.exp()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Keeping()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x).sum()

    subject = Subject(Outer, lambda: torch.randn(4, 6), ("Outer.part",))
    plan = subject.plan(recompute_everything)
    model, inputs = subject.new()
    expected = outcome(model, lambda: model(inputs))
    with applied(model, plan), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert expected.differences(outcome(model, lambda: model(inputs))) == []
    kept.clear()
    assert len(caught) == 1
    assert "kept a result beyond that" in str(caught[0].message)


def test_copying_a_structure_copies_what_can_change_and_nothing_else() -> None:
    tensor, module = torch.ones(2), nn.Linear(1, 1)
    cache = Cache()
    cache.keys[0] = tensor
    cycle: list[Any] = [cache, (tensor, {"m": module}), {1, 2}]
    cycle.append(cycle)
    copied = copy_structure(cycle)
    assert copied is not cycle and copied[3] is copied
    assert copied[0] is not cache and copied[0].keys is not cache.keys and copied[0].keys[0] is tensor
    assert copied[1][0] is tensor and copied[1][1]["m"] is module
    assert copied[2] == {1, 2} and copied[2] is not cycle[2]
    fixed = (tensor, "text", 3, None, (module,))
    assert copy_structure(fixed) is fixed


class Pair(NamedTuple):
    hidden: Any
    seen: list[int]


class Slots:
    __slots__ = ("hidden", "seen")

    def __init__(self, hidden: Any, seen: list[int]) -> None:
        self.hidden, self.seen = hidden, seen


class Items(dict[str, Any]):
    hidden = property(lambda self: self["hidden"])
    seen = property(lambda self: self["seen"])


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Any
    seen: list[int]


PASSED_AROUND = {
    "named tuple": Pair,
    "slots": Slots,
    "dict": lambda hidden, seen: Items(hidden=hidden, seen=seen),
    "deque": lambda hidden, seen: Frozen(hidden, deque([seen])),  # type: ignore[arg-type]
    "frozen dataclass": Frozen,
}


@pytest.mark.parametrize("kind", PASSED_AROUND)
def test_objects_that_regions_change_and_pass_on(kind: str) -> None:
    class Reads(nn.Module):
        """Computes something else each time it sees the same object."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, state: Any) -> torch.Tensor:
            seen = state.seen[0] if isinstance(state.seen, deque) else state.seen
            seen.append(1)
            result = (self.linear(state.hidden) * len(seen)).sin().exp()
            if isinstance(state, Slots):
                state.hidden = result
            return result

    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Reads() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen: list[int] = []
            for part in self.parts:
                x = part(PASSED_AROUND[kind](x, seen))
            return x.square().mean()

    regions = [f"Passes.parts.{number}" for number in range(3)]
    subject = Subject(Passes, lambda: torch.randn(4, 6), regions)
    assert_same_with(subject, subject.plan(recompute_everything), steps=2)


class Meter:
    def __init__(self) -> None:
        self.count, self.history = 0, {"counts": [0]}


class Metered(nn.Module):
    """Changes what its attributes refer to, and computes with it."""

    def __init__(self, meter: Meter | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.meter = Meter() if meter is None else meter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter.count += 1
        self.meter.history["counts"].append(self.meter.count)
        return (self.linear(x) * sum(self.meter.history["counts"])).sin().exp()


@pytest.mark.parametrize("shared", [True, False])
def test_objects_in_attributes_change_once(shared: bool) -> None:
    def model() -> nn.Sequential:
        meter = Meter() if shared else None
        return nn.Sequential(*(Metered(meter) for _ in range(3)))

    regions = ("Sequential.0", "Sequential.1", "Sequential.2")
    run = lambda model, x: model(x).square().mean()  # noqa: E731
    assert_same(Subject(model, lambda: torch.randn(4, 6), regions, run))
    planned, inputs = model(), torch.randn(4, 6)
    plan = Subject(model, lambda: torch.randn(4, 6), regions, run).plan(recompute_everything)
    with applied(planned, plan):
        planned(inputs).sum().backward()
    assert planned[0].meter.count == (3 if shared else 1)


def test_attributes_that_are_set_between_forward_and_backward() -> None:
    """Backward of the first forward must not see what was set for the second."""

    class Conditioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.scale: Any = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * self.scale).sin().exp()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Conditioned()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.part.scale = 2.0
            first = self.part(x)
            self.part.scale = x.cos()
            second = self.part(first)
            self.part.scale = None
            return second.square().mean()

    assert_same(Subject(Twice, lambda: torch.randn(4, 6), ("Twice.part",)))


@pytest.mark.parametrize("change", ["attribute", "buffer", "item", "new", "gone"])
def test_attributes_come_back(change: str) -> None:
    module = nn.Sequential(Stateful())
    inner = module[0]
    state = ModuleAttributes(module)
    assert state.is_present()
    if change == "attribute":
        inner.calls = 5
    elif change == "buffer":
        inner.average = torch.zeros(6)
    elif change == "item":
        inner.losses.append(torch.zeros(()))
    elif change == "new":
        inner.other = 1
    else:
        del inner.calls
    assert not state.is_present()
    before = dict(vars(inner)), inner.average, list(inner.losses)
    with state.restored():
        assert inner.calls == 0 and inner.average.sum() == 6 and inner.losses == []
        assert not hasattr(inner, "other")
        inner.calls, inner.average = 9, torch.ones(1)
        inner.losses.append(torch.ones(()))
        inner.fresh = True
    assert (dict(vars(inner)), inner.average, list(inner.losses)) == before


class CountingGroup(dist.ProcessGroup):
    """A process group that is written in Python, and numbers its messages."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.messages = 0


class Sends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.group, self.linear = CountingGroup(), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.group.messages += 1
        return self.linear(x).tanh()


def test_what_a_process_group_counts_is_never_put_back() -> None:
    """Other ranks have counted, too: a number that is used twice makes them wait for ever."""
    module = Sends()
    attributes = ModuleAttributes(module)
    module(torch.ones(2, 6))
    with attributes.restored():
        module(torch.ones(2, 6))
        assert module.group.messages == 2
    assert module.group.messages == 2
    assert copy_structure({"group": module.group})["group"] is module.group


class Various(nn.Module):
    """A module with a little of everything in its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shape, self.noted, self.last = nn.Linear(2, 2), (1, 2), [1, [2]], None
        self.register_buffer("seen", torch.zeros(2))


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda module: setattr(module, "last", 1),
    "another name": lambda module: (delattr(module, "last"), setattr(module, "none", None)),
    "an equal list": lambda module: setattr(module, "noted", [*module.noted]),
    "a list": lambda module: module.noted[1].append(3),
    "training": lambda module: module.eval(),
    "of an inner module": lambda module: setattr(module.inner, "in_features", 3),
    "an inner module": lambda module: setattr(module, "inner", nn.Linear(2, 2)),
    "one more": lambda module: module.inner.add_module("more", nn.Tanh()),
    "a buffer": lambda module: setattr(module, "seen", torch.zeros(2)),
    "a first buffer": lambda module: module.inner.register_buffer("first", torch.zeros(2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_attributes_are_looked_at_anew_when_something_has_changed(change: str) -> None:
    module, last = Various(), LastAttributes()
    before = last.now(module)
    assert last.now(module) is before
    CHANGES[change](module)
    after = last.now(module)
    assert after is not before
    assert after.is_present() and list(after.modules) == list(module.modules())
    assert last.now(module) is after


@pytest.mark.parametrize("value", [torch.zeros(2), [torch.zeros(2)], (torch.zeros(2),), object()])
def test_attributes_that_may_hold_tensors_are_not_held(value: Any) -> None:
    module, last = Various(), LastAttributes()
    module.last = value
    assert last.now(module) is not last.now(module)
    assert last.now(module).is_present()


def test_attributes_that_change_each_time_are_not_held() -> None:
    module, last = Various(), LastAttributes()
    for number in range(50):
        module.last = number
        last.now(module)
    assert last.now(module) is not last.now(module)
