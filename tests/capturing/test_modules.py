"""Which module each op belongs to, forward and backward, and the four orders of module calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from captured_steps import (
    Build,
    captured,
    of_category,
    only_op,
    op_names,
    ops,
    owned_bytes,
    result_of,
    show,
    training,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainfit.memory.module_stats import module_stats
from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

pytestmark = pytest.mark.usefixtures("little_garbage")


class Block(nn.Module):
    """Two linear layers and an activation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(scope="module")
def net() -> Trace:
    return captured(training(Net, 3, 4))


def names_of(trace: Trace) -> list[str]:
    return [module.name for module in trace.modules]


def module_of(trace: Trace, op: int) -> str:
    return trace.module_name(trace.ops[op].module)


# Names and orders -----------------------------------------------------------------------------------------


def test_names_begin_with_the_class_of_the_root(net: Trace) -> None:
    assert names_of(net) == [
        "Net",
        "Net.blocks",
        "Net.blocks.0",
        "Net.blocks.0.up",
        "Net.blocks.0.down",
        "Net.blocks.1",
        "Net.blocks.1.up",
        "Net.blocks.1.down",
    ]
    parents = [net.module_name(module.parent) for module in net.modules]
    assert parents == [
        "Global",
        "Net",
        "Net.blocks",
        *["Net.blocks.0"] * 2,
        "Net.blocks",
        *["Net.blocks.1"] * 2,
    ]
    assert [module.class_name for module in net.modules[:4]] == ["Net", "ModuleList", "Block", "Linear"]


def test_modules_own_the_bytes_of_their_own_parameters(net: Trace) -> None:
    owned = {module.name: owned_bytes(net, module.parameters) for module in net.modules}
    assert owned["Net.blocks.0.up"] == owned["Net.blocks.1.up"] == (8 * 4 + 8) * 4
    assert owned["Net.blocks.0.down"] == (4 * 8 + 4) * 4
    assert owned["Net"] == owned["Net.blocks"] == owned["Net.blocks.0"] == 0
    assert {module.buffers for module in net.modules} == {()}


def test_buffers_count_for_the_module_that_registered_them() -> None:
    trace = captured(training(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 3, 4))
    (norm,) = [module for module in trace.modules if module.class_name == "BatchNorm1d"]
    assert owned_bytes(trace, norm.parameters) == 2 * 4 * 4
    assert (
        owned_bytes(trace, norm.buffers) == 2 * 4 * 4 + 8
    )  # running mean and variance, and the count of batches
    assert sum(storage.bytes for storage in of_category(trace, "buffer")) == owned_bytes(trace, norm.buffers)


def test_the_four_orders(net: Trace) -> None:
    assert net.call_names(net.forward_pre_order) == (
        "Net",
        "Net.blocks.0",
        "Net.blocks.0.up",
        "Net.blocks.0.down",
        "Net.blocks.1",
        "Net.blocks.1.up",
        "Net.blocks.1.down",
    )
    assert net.call_names(net.forward_post_order) == (
        "Net.blocks.0.up",
        "Net.blocks.0.down",
        "Net.blocks.0",
        "Net.blocks.1.up",
        "Net.blocks.1.down",
        "Net.blocks.1",
        "Net",
    )
    assert net.call_names(net.backward_pre_order) == (
        "Net",
        "Net.blocks.1",
        "Net.blocks.1.down",
        "Net.blocks.1.up",
        "Net.blocks.0",
        "Net.blocks.0.down",
        "Net.blocks.0.up",
    )
    assert net.call_names(net.backward_post_order) == (
        "Net.blocks.1.down",
        "Net.blocks.1.up",
        "Net.blocks.1",
        "Net.blocks.0.down",
        "Net.blocks.0.up",
        "Net.blocks.0",
        "Net",
    )


def test_a_call_lies_within_the_call_that_made_it(net: Trace) -> None:
    for call in net.calls:
        if call.parent >= 0:
            outer = net.calls[call.parent]
            assert outer.forward_start <= call.forward_start < call.forward_end <= outer.forward_end
            assert outer.backward_start <= call.backward_start < call.backward_end <= outer.backward_end


# Forward and backward ops ---------------------------------------------------------------------------------


def test_each_backward_op_belongs_to_the_module_of_the_op_that_it_differentiates(net: Trace) -> None:
    backward = ops(net, phase="backward")
    assert backward
    for number in backward:
        op = net.ops[number]
        assert op.forward_op >= 0, show(net)
        assert (op.module, op.call) == (net.ops[op.forward_op].module, net.ops[op.forward_op].call)


def test_forward_op_names_the_op_that_is_differentiated(net: Trace) -> None:
    pairs = {
        (op_names(net, [net.ops[number].forward_op])[0], op_names(net, [number])[0])
        for number in ops(net, phase="backward")
    }
    assert ("tanh", "tanh_backward") in pairs
    assert ("addmm", "mm") in pairs
    assert ("t", "t") in pairs
    assert ("sum", "expand") in pairs
    for number in ops(net, "tanh_backward"):
        op = net.ops[number]
        forward = net.ops[op.forward_op]
        # It reads what the forward op made.
        assert set(forward.creates) <= set(op.reads)


def test_the_backward_of_a_write_into_a_view_differentiates_that_write() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            copy = self.layer(x).clone()
            copy[:, 1:3].tanh_()
            return copy

    trace = captured(training(Writing, 3, 4))
    (backward,) = ops(trace, "tanh_backward")
    assert trace.ops[backward].forward_op == only_op(trace, "tanh_"), show(trace)


def test_forward_and_optimizer_ops_differentiate_nothing(net: Trace) -> None:
    assert {net.ops[n].forward_op for n in ops(net, phase="forward") + ops(net, phase="optimizer")} == {-1}


def test_what_runs_outside_of_modules_is_global(net: Trace) -> None:
    assert module_of(net, only_op(net, "ones_like")) == "Global"
    assert {module_of(net, op) for op in ops(net, phase="optimizer")} == {"Global"}


def test_the_gradients_of_a_layer_are_made_by_that_layer(net: Trace) -> None:
    made = [(module_of(net, storage.producer), storage.bytes) for storage in of_category(net, "gradient")]
    assert sorted(made) == sorted(
        (f"Net.blocks.{number}.{layer}", size)
        for number in (0, 1)
        for layer, size in [("up", 128), ("up", 32), ("down", 128), ("down", 16)]
    )


def test_accumulating_into_a_parameter_belongs_to_the_module_that_owns_it() -> None:
    # GIVEN gradients that are there already, so that AccumulateGrad adds to them
    def build() -> Step:
        model, inputs = Net(), torch.randn(3, 4)

        def run() -> None:
            model(inputs).sum().backward()
            for parameter in model.parameters():
                parameter.grad.zero_()

        return Step(model, None, run)

    trace = captured(build)
    # THEN each addition is in the backward of the parameter's own module
    additions = ops(trace, "add_", phase="backward")
    owners = [module_of(trace, addition) for addition in additions]
    layers = ["Net.blocks.0.up", "Net.blocks.0.down", "Net.blocks.1.up", "Net.blocks.1.down"]
    assert sorted(owners) == sorted(layers * 2)


def test_clipping_and_averaging_between_backward_and_optimizer_are_in_the_optimizer_phase() -> None:
    def build() -> Step:
        model, inputs = Net(), torch.randn(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def run() -> None:
            model(inputs).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        return Step(model, optimizer, run)

    trace = captured(build)
    last = max(ops(trace, phase="backward"))
    assert {trace.ops[number].phase for number in range(last + 1, len(trace.ops))} == {"optimizer"}
    assert any("norm" in name for name in op_names(trace, ops(trace, phase="optimizer")))


# What modules return --------------------------------------------------------------------------------------


@dataclass
class Output:
    """A dataclass with a tensor in it."""

    hidden: torch.Tensor
    extra: str = "not a tensor"


class Opaque:
    """An object that torch knows nothing about."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        pytest.param(lambda x: x, lambda y: y, id="tensor"),
        pytest.param(lambda x: (x, None, 3), lambda y: y[0], id="tuple"),
        pytest.param(lambda x: {"hidden": [x]}, lambda y: y["hidden"][0], id="dict of lists"),
        pytest.param(Output, lambda y: y.hidden, id="dataclass"),
        pytest.param(Opaque, lambda y: y.hidden, id="object"),
        pytest.param(lambda x: lambda: x, lambda y: y(), id="function"),
    ],
)
def test_attribution_does_not_depend_on_what_a_module_returns(
    wrap: Callable[..., Any], unwrap: Callable[..., Any]
) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return wrap(torch.tanh(self.layer(unwrap(x))))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(wrap(x))

    trace = captured(training(Outer, 3, 4, loss=lambda y: unwrap(y).sum()))
    assert module_of(trace, only_op(trace, "tanh_backward")) == "Outer.inner"
    assert {module_of(trace, op) for op in ops(trace, "mm")} == {"Outer.inner.layer"}
    assert trace.call_names(trace.backward_pre_order) == ("Outer", "Outer.inner", "Outer.inner.layer")
    assert trace.call_names(trace.backward_post_order) == ("Outer.inner.layer", "Outer.inner", "Outer")


def test_a_module_that_returns_nothing_is_attributed() -> None:
    # GIVEN a module that leaves its result in a list
    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, results: list[torch.Tensor]) -> None:
            results.append(torch.tanh(self.layer(x)))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.writer = Writer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            results: list[torch.Tensor] = []
            assert self.writer(x, results) is None
            return results[0]

    trace = captured(training(Outer, 3, 4))
    assert module_of(trace, only_op(trace, "tanh")) == "Outer.writer"
    assert module_of(trace, only_op(trace, "tanh_backward")) == "Outer.writer"


# Called often, shared, outside ----------------------------------------------------------------------------


def test_a_module_called_twice_has_two_calls_with_a_backward_each() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.layer(x))

    trace = captured(training(Twice, 3, 4))
    block = names_of(trace).index("Twice.layer")
    first, second = [call for call in trace.calls if call.module == block]
    # Forward one after the other, backward the other way round.
    assert first.forward_end <= second.forward_start
    assert 0 <= second.backward_start < second.backward_end <= first.backward_start < first.backward_end
    # Each tanh's backward belongs to the call of its tanh.
    for backward in ops(trace, "tanh_backward"):
        op = trace.ops[backward]
        assert op.call == trace.ops[op.forward_op].call
    calls = [trace.ops[op].call for op in ops(trace, "tanh_backward")]
    assert calls == sorted(calls, reverse=True)
    assert len(set(calls)) == 2
    order = trace.call_names(trace.backward_pre_order)
    assert order.count("Twice.layer") == order.count("Twice.layer.up") == 2


def test_a_module_shared_under_two_names_keeps_the_first_and_its_bytes_count_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)))

    trace = captured(training(Shared, 3, 4))
    assert names_of(trace) == ["Shared", "Shared.first"]
    assert {module_of(trace, op) for op in ops(trace, "addmm")} == {"Shared.first"}
    assert [call.module for call in trace.calls] == [0, 1, 1]
    assert sum(owned_bytes(trace, module.parameters) for module in trace.modules) == (4 * 4 + 4) * 4


def _with_outsider() -> Step:
    model, outsider, inputs = Net(), Block(), torch.randn(3, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *outsider.parameters()], lr=0.1)

    def run() -> torch.Tensor:
        loss = outsider(model(inputs)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Step(model, optimizer, run)


def test_a_module_outside_the_models_tree_becomes_a_root_of_its_own() -> None:
    trace = captured(_with_outsider)
    assert [name for name in names_of(trace) if "." not in name] == ["Net", "Block"]
    assert module_of(trace, ops(trace, "tanh")[-1]) == "Block"
    assert {module_of(trace, op) for op in ops(trace, "tanh_backward")} == {
        "Net.blocks.0",
        "Net.blocks.1",
        "Block",
    }
    parameters = of_category(trace, "parameter")
    assert len(parameters) == 3 * 4


def test_the_model_is_the_first_root_even_if_another_module_is_called_first() -> None:
    # GIVEN an outsider that runs before the model does
    def build() -> Step:
        outsider, model, inputs = Block(), Net(), torch.randn(3, 4)

        def run() -> torch.Tensor:
            loss = model(outsider(inputs)).sum()
            loss.backward()
            model.zero_grad()
            outsider.zero_grad()
            return loss

        return Step(model, None, run)

    trace = captured(build)
    assert {"Net", "Block"} == {name for name in names_of(trace) if "." not in name}
    assert trace.call_names(trace.forward_pre_order)[0] == "Block"
    assert {storage.category for storage in trace.storages if storage.persistent} == {"parameter", "input"}


def test_two_roots_of_one_class_get_different_names() -> None:
    def build() -> Step:
        first, second, inputs = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(3, 4)

        def run() -> torch.Tensor:
            loss = second(first(inputs)).sum()
            loss.backward()
            for layer in (first, second):
                layer.zero_grad()
            return loss

        return Step(first, None, run)

    trace = captured(build)
    assert names_of(trace) == ["Linear", "Linear#2"]


def test_a_module_that_raises_and_is_caught_still_ends() -> None:
    # GIVEN a module whose child fails, after which it does something else
    class Fragile(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.sigmoid(x)
            raise ValueError("no")

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fragile = Fragile()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.fragile(x)
            except ValueError:
                return torch.tanh(self.layer(x))

    trace = captured(training(Careful, 3, 4))
    assert module_of(trace, only_op(trace, "sigmoid")) == "Careful.fragile"
    assert module_of(trace, only_op(trace, "tanh")) == "Careful"
    assert trace.call_names(trace.forward_post_order) == ("Careful.fragile", "Careful.layer", "Careful")


# Recomputation --------------------------------------------------------------------------------------------


def _checkpointed(reentrant: bool) -> Build:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(4, 4)
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, torch.tanh(self.stem(x)), use_reentrant=reentrant)

    return training(Checkpointed, 3, 4)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_a_checkpointed_module_runs_again_in_backward(reentrant: bool) -> None:
    trace = captured(_checkpointed(reentrant))
    # GIVEN the tanh of the block: it runs in forward, and again in backward
    forward, again = ops(trace, "tanh", module="Checkpointed.block")
    assert (trace.ops[forward].phase, trace.ops[forward].recompute) == ("forward", False)
    assert (trace.ops[again].phase, trace.ops[again].recompute) == ("backward", True)
    # THEN nothing but the block runs again
    modules = {module_of(trace, op) for op in ops(trace, recompute=True)}
    assert modules <= {"Checkpointed.block", "Checkpointed.block.up", "Checkpointed.block.down"}
    # AND its call is one of recomputation
    block = names_of(trace).index("Checkpointed.block")
    first, second = [call for call in trace.calls if call.module == block]
    assert (first.recompute, second.recompute) == (False, True)
    assert second.forward_start > max(ops(trace, phase="forward"))
    # AND the first tanh's result is not kept for backward, the second's is
    assert trace.backward_readers(result_of(trace, forward)) == ()
    (backward,) = [op for op in ops(trace, "tanh_backward") if module_of(trace, op) == "Checkpointed.block"]
    assert backward in trace.backward_readers(result_of(trace, again))
    assert not trace.ops[backward].recompute


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_the_backward_of_a_checkpointed_module_is_attributed_to_it(reentrant: bool) -> None:
    trace = captured(_checkpointed(reentrant))
    in_block = [
        op for op in ops(trace, phase="backward", recompute=False)
        if module_of(trace, op).startswith("Checkpointed.block")
    ]  # fmt: skip
    assert [name for name in op_names(trace, in_block) if name in ("mm", "tanh_backward")] == [
        "mm",
        "mm",
        "tanh_backward",
        "mm",
        "mm",
    ]
    for number in in_block:
        forward = trace.ops[number].forward_op
        assert forward >= 0
        assert module_of(trace, forward) == module_of(trace, number)
    # The linear layers' gradients are made by them.
    owners = {module_of(trace, storage.producer) for storage in of_category(trace, "gradient")}
    assert owners == {"Checkpointed.stem", "Checkpointed.block.up", "Checkpointed.block.down"}


def test_the_forward_order_does_not_list_recomputation() -> None:
    trace = captured(_checkpointed(False))
    assert trace.call_names(trace.forward_pre_order) == (
        "Checkpointed",
        "Checkpointed.stem",
        "Checkpointed.block",
        "Checkpointed.block.up",
        "Checkpointed.block.down",
    )


# Gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_every_module_has_the_gradients_of_its_parameters(set_to_none: bool) -> None:
    # GIVEN gradients that are made in every step, or kept and set to zero
    def build() -> Step:
        model, inputs = Net(), torch.randn(3, 4)

        def run() -> torch.Tensor:
            loss = model(inputs).sum()
            loss.backward()
            model.zero_grad(set_to_none=set_to_none)
            return loss

        return Step(model, None, run)

    found = {module.name: module.gradient_bytes for module in module_stats(simulate(captured(build)))}
    # THEN they count the same: 8 x 4 weights and 8 biases up, 4 x 8 weights and 4 biases down
    up, down = (8 * 4 + 8) * 4, (4 * 8 + 4) * 4
    assert found == {
        "Net": 2 * (up + down),
        "Net.blocks": 2 * (up + down),
        "Net.blocks.0": up + down,
        "Net.blocks.0.up": up,
        "Net.blocks.0.down": down,
        "Net.blocks.1": up + down,
        "Net.blocks.1.up": up,
        "Net.blocks.1.down": down,
    }
