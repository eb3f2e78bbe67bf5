"""A plan works with what training code does: autocast, accumulation, copies, hooks, several calls."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from planned_models import TRANSFORMER, Block, Subject, Transformer, assert_same_with, outcome, tokens
from plans import as_a_whole, plan_for, recompute_everything, save_products
from torch import nn

from trainfit.applying import applied, apply, remove
from trainfit.applying.planned_forward import PlannedForward
from trainfit.errors import PlanError
from trainfit.plans.plan import Plan

POLICIES = (recompute_everything, as_a_whole, save_products)


@cache
def transformer_plan() -> Plan:
    return TRANSFORMER.plan(save_products)


def assert_the_same(subject: Subject) -> None:
    trace = subject.trace()
    for policy in POLICIES:
        assert_same_with(subject, plan_for(trace, subject.regions, policy), steps=2)


# What surrounds the model ---------------------------------------------------------------------------------


def under_autocast(model: nn.Module, inputs: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(inputs)


def test_autocast() -> None:
    assert_the_same(Subject(Transformer, tokens, TRANSFORMER.regions, under_autocast))


def test_autocast_with_a_weight_that_is_in_its_cache_already() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(self.part(self.part(x))).sum()

    assert_the_same(Subject(Twice, lambda: torch.randn(3, 8), ("Twice.part",), under_autocast))


def test_backward_inside_autocast() -> None:
    plan = Subject(Transformer, tokens, TRANSFORMER.regions, under_autocast).plan(save_products)

    def run(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            # Casts of the first forward are in the cache in its backward and in the second forward.
            for _ in range(2):
                model(inputs).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = run(*TRANSFORMER.new())
    model, inputs = TRANSFORMER.new()
    with applied(model, plan):
        assert all(map(torch.equal, expected, run(model, inputs)))


def test_gradient_scaler() -> None:
    def train(plan: Plan | None) -> list[torch.Tensor]:
        model, inputs = TRANSFORMER.new()
        if plan is not None:
            apply(model, plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        torch.manual_seed(0)
        for _ in range(3):
            scaler.scale(under_autocast(model, inputs)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return list(model.parameters())

    plan = Subject(Transformer, tokens, TRANSFORMER.regions, under_autocast).plan(save_products)
    assert all(map(torch.equal, train(None), train(plan)))


def test_accumulated_gradients_of_several_forwards_before_any_backward() -> None:
    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs) + model(inputs.flip(0)) * 2

    assert_same_with(Subject(Transformer, tokens, TRANSFORMER.regions, loss), transformer_plan())


@pytest.mark.parametrize("policy", POLICIES)
def test_backward_twice_through_a_retained_graph(policy: Any) -> None:
    plan = TRANSFORMER.plan(policy)

    def run(model: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(0)
        loss = model(inputs)
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = run(*TRANSFORMER.new())
    model, inputs = TRANSFORMER.new()
    with applied(model, plan):
        assert all(map(torch.equal, expected, run(model, inputs)))


def test_gradients_of_gradients() -> None:
    class Smooth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x).sum()

    def penalty(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        inputs = inputs.clone().requires_grad_()
        value = model(inputs)
        (slope,) = torch.autograd.grad(value, inputs, create_graph=True)
        return value + slope.square().sum()

    assert_the_same(Subject(Smooth, lambda: torch.randn(3, 4), ("Smooth.part",), penalty))


@pytest.fixture
def one_process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("before", [True, False])
def test_distributed_data_parallel(before: bool) -> None:
    model, inputs = TRANSFORMER.new()
    expected = outcome(model, lambda: model(inputs))
    planned, _ = TRANSFORMER.new()
    if before:
        apply(planned, transformer_plan())
    parallel = nn.parallel.DistributedDataParallel(planned)
    if not before:
        apply(parallel, transformer_plan())
    assert expected.differences(outcome(planned, lambda: parallel(inputs))) == []
    remove(parallel)
    assert "forward" not in vars(planned)


@pytest.mark.usefixtures("one_process_group")
def test_accumulation_without_synchronisation() -> None:
    def gradients(plan: Plan | None) -> list[torch.Tensor]:
        model, inputs = TRANSFORMER.new()
        parallel = nn.parallel.DistributedDataParallel(model)
        if plan is not None:
            apply(parallel, plan)
        torch.manual_seed(0)
        with parallel.no_sync():
            parallel(inputs).backward()
        parallel(inputs.flip(0)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert all(map(torch.equal, gradients(None), gradients(transformer_plan())))


@pytest.mark.parametrize("evaluating", [True, False])
def test_without_gradients_nothing_is_changed(evaluating: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = TRANSFORMER.new()
    model.train(not evaluating)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = model(inputs)
        monkeypatch.setattr("trainfit.applying.planned_forward.RegionCall", None)
        with applied(model, transformer_plan()):
            torch.manual_seed(0)
            assert torch.equal(model(inputs), expected)


def test_evaluation_with_gradients_does_not_warn() -> None:
    model, inputs = TRANSFORMER.new()
    model.eval()
    expected = outcome(model, lambda: model(inputs))
    with applied(model, transformer_plan()):
        assert expected.differences(outcome(model, lambda: model(inputs))) == []


def test_frozen_weights() -> None:
    def frozen() -> nn.Module:
        model = Transformer()
        model.embedding.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        model.blocks[1].up.requires_grad_(False)
        return model

    assert_the_same(Subject(frozen, tokens, TRANSFORMER.regions))


# The model object -----------------------------------------------------------------------------------------


def test_the_state_dict_has_the_same_keys() -> None:
    model, _ = TRANSFORMER.new()
    names, state = [n for n, _ in model.named_modules()], model.state_dict()
    with applied(model, transformer_plan()):
        assert [n for n, _ in model.named_modules()] == names
        assert list(model.state_dict()) == list(state)
        model.load_state_dict(state)


def through_pickle(model: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(model))
    return copied


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copied: nn.Module = torch.load(file, weights_only=False)
    return copied


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
def test_a_copy_runs_the_plan_on_its_own_weights(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model, inputs = TRANSFORMER.new()
    expected = outcome(model, lambda: model(inputs))
    apply(model, transformer_plan())
    copied = duplicate(model)
    model.zero_grad()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert expected.differences(outcome(copied, lambda: copied(inputs))) == []
    assert all(p.grad is None for p in model.parameters())
    assert isinstance(vars(copied.blocks[0])["forward"], PlannedForward)
    remove(copied)
    assert "forward" not in vars(copied.blocks[0])
    assert "forward" in vars(model.blocks[0])


def test_applying_twice_is_refused() -> None:
    model, _ = TRANSFORMER.new()
    apply(model, transformer_plan())
    with pytest.raises(PlanError, match="runs a plan already"):
        apply(model, transformer_plan())
    remove(model)
    with pytest.raises(PlanError, match="runs no plan"):
        remove(model)


def test_removing_restores_the_model() -> None:
    model, _ = TRANSFORMER.new()
    own = lambda x: x  # noqa: E731
    model.blocks[1].forward = own
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(ZeroDivisionError), applied(model, transformer_plan()):
        1 / 0  # noqa: B018
    assert [dict(vars(module)) for module in model.modules()] == before
    assert model.blocks[1].forward is own


@pytest.mark.parametrize("alone", [True, False])
def test_removing_a_plan_that_someone_has_wrapped(alone: bool) -> None:
    import functools

    subject = Subject(Transformer, tokens, ("Transformer",) if alone else TRANSFORMER.regions)
    model, inputs = subject.new()
    apply(model, subject.plan(save_products))
    planned = model.forward
    model.forward = functools.wraps(planned)(lambda *args: planned(*args))
    with pytest.raises(PlanError, match="runs a plan already"):
        apply(model, transformer_plan())
    remove(model)
    expected = outcome(subject.new()[0], lambda: subject.new()[0](inputs)).loss
    ran: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainfit.applying.planned_forward.RegionCall", lambda *args: ran.append(1))
        assert torch.equal(outcome(model, lambda: model(inputs)).loss, expected)
    assert not ran
    with applied(model, transformer_plan()):
        assert torch.equal(outcome(model, lambda: model(inputs)).loss, expected)


def test_copies_for_several_devices_are_refused() -> None:
    model, _ = TRANSFORMER.new()
    parallel = nn.DataParallel(model)
    parallel.device_ids = [0, 1]
    with pytest.raises(PlanError, match=r"copies cannot run a plan\. Use DistributedDataParallel"):
        apply(parallel, transformer_plan())


def test_a_plan_of_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match="it is for a Transformer, not a Linear"):
        apply(nn.Linear(2, 2), transformer_plan())
    smaller = Transformer(blocks=1)
    with pytest.raises(PlanError, match=r"has a region Transformer\.blocks\.1, which this Transformer"):
        apply(smaller, transformer_plan())
    assert all("forward" not in vars(module) for module in smaller.modules())


def test_a_model_with_a_plan_dies_when_it_is_let_go() -> None:
    import weakref

    model, inputs = TRANSFORMER.new()
    apply(model, transformer_plan())
    model(inputs).backward()
    gone = weakref.ref(model.blocks[0])
    del model
    assert gone() is None


def test_the_signature_of_forward_can_be_asked() -> None:
    model, _ = TRANSFORMER.new()
    before = inspect.signature(model.forward)
    with applied(model, transformer_plan()):
        assert inspect.signature(model.forward) == before


# How modules are called -----------------------------------------------------------------------------------


class Several(nn.Module):
    """One module called several times, from two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block(8)
        self.outer = nn.ModuleDict({"same": self.first, "other": Block(8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.first(x))
        return self.outer["other"](self.outer["same"](x)).square().mean()


def test_a_module_that_is_called_several_times() -> None:
    assert_the_same(Subject(Several, lambda: torch.randn(2, 4, 8), ("Several.first", "Several.outer.other")))


def test_only_some_calls_of_a_module_are_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    subject = Subject(Several, lambda: torch.randn(2, 4, 8), ("Several.first",))
    plan = subject.plan(recompute_everything)
    assert [region.call for region in plan.regions] == [0, 1, 2]
    plan = dataclasses.replace(plan, regions=plan.regions[1:2])
    ran: list[int] = []
    from trainfit.applying.region import RegionCall

    original = RegionCall.run
    monkeypatch.setattr(RegionCall, "run", lambda *args: ran.append(1) or original(*args))
    assert_same_with(subject, plan, steps=3)
    assert len(ran) == 3


@dataclass
class Output:
    value: torch.Tensor
    extra: dict[str, Any]


class Unusual(nn.Module):
    """Keyword and non-tensor arguments, nested ones, and an output of its own type."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(
        self, x: torch.Tensor, scale: float, *, use_reentrant: torch.Tensor, pair: Any, how: str = "no"
    ) -> Output:
        assert how == "yes"
        hidden = torch.tanh(self.linear(x) * scale + use_reentrant)
        return Output(hidden * pair[0]["a"], {"sum": hidden.sum(), "list": [hidden, None]})


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(6, 6), Unusual()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        out = self.inner(h, 0.5, use_reentrant=h * 2, pair=({"a": h.sin()}, 3), how="yes")
        return out.value.sum() + out.extra["sum"] + out.extra["list"][0].square().sum()


def test_unusual_arguments_and_outputs() -> None:
    assert_the_same(Subject(Caller, lambda: torch.randn(2, 6), ("Caller.inner",)))


def test_hooks_on_a_region() -> None:
    seen: list[str] = []

    def hooked() -> nn.Module:
        model = Transformer()
        block = model.blocks[0]
        block.register_forward_pre_hook(lambda module, args: seen.append("before"))
        block.register_forward_hook(lambda module, args, output: seen.append("after"))
        block.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward"))
        return model

    subject = Subject(hooked, tokens, TRANSFORMER.regions)
    plan = subject.plan(save_products)
    model, inputs = subject.new()
    with applied(model, plan):
        seen.clear()
        model(inputs).backward()
    assert seen == ["before", "after", "backward"]
    assert_same_with(subject, plan)


def test_a_region_inside_an_outer_checkpoint() -> None:
    from torch.utils.checkpoint import checkpoint

    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, inputs, use_reentrant=False)

    assert_same_with(Subject(Transformer, tokens, TRANSFORMER.regions, loss), transformer_plan())


@pytest.mark.parametrize("reentrant", [False, True])
def test_regions_that_are_checkpointed_already(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Plain(Several):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(self.outer["other"](self.first(x))).square().mean()

    class Checkpointed(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            for block in (self.first, self.outer["other"], self.first):
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x.square().mean()

    def inputs() -> torch.Tensor:
        return torch.randn(2, 4, 8)

    plan = Subject(Plain, inputs, ("Plain.first", "Plain.outer.other")).plan(save_products)
    assert_same_with(Subject(Checkpointed, inputs, ()), plan, steps=2)


def test_saved_tensors_that_are_moved_elsewhere() -> None:
    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(inputs)

    assert_same_with(Subject(Transformer, tokens, TRANSFORMER.regions, loss), transformer_plan())


def test_modules_called_without_the_root() -> None:
    def loss(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        x = model.embedding(inputs)
        return model.blocks[1](model.blocks[0](x)).square().mean()

    with contextlib.nullcontext():
        assert_same_with(Subject(Transformer, tokens, TRANSFORMER.regions, loss), transformer_plan(), steps=3)
