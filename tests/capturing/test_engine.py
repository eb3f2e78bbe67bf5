"""What autograd's engine does in place in a real run, and must do in place in a capture as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captured_steps import Build, assert_exact, captured, only_op, op_names, ops, result_of, show, training
from torch import nn

from trainfit.steps.step import Step
from trainfit.traces.trace import Trace

pytestmark = pytest.mark.usefixtures("little_garbage")

ROWS, WIDTH = 64, 4
ACTIVATION = ROWS * WIDTH * 4


def using(function: Callable[[torch.Tensor], torch.Tensor], rows: int = ROWS) -> Build:
    """Return a build whose model applies `function` to the result of a linear layer."""

    class Using(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(self.layer(x))

    return training(Using, rows, WIDTH)


def backward_names(trace: Trace) -> list[str]:
    """Return the backward ops of the function, without views and without those of the linear layer."""
    of_function = [
        op for op in ops(trace, phase="backward") if "layer" not in trace.module_name(trace.ops[op].module)
    ]
    return op_names(trace, of_function, views=False)


# Fan-out --------------------------------------------------------------------------------------------------


def test_the_gradients_of_several_users_are_added_into_the_first() -> None:
    # GIVEN a tensor with three users
    build = using(lambda y: y.exp() + y.tanh() + y.sigmoid())
    trace = captured(build)
    # THEN each later gradient is added into the buffer of the first: no memory for sums
    assert backward_names(trace) == ["sigmoid_backward", "tanh_backward", "add_", "mul", "add_"], show(trace)
    first = result_of(trace, only_op(trace, "sigmoid_backward"))
    for addition in ops(trace, "add_", phase="backward"):
        assert trace.ops[addition].writes == (first,)
        assert trace.ops[addition].creates == ()
    assert_exact(build)


def test_a_gradient_that_goes_to_two_places_is_not_written_into() -> None:
    # GIVEN y + y: both inputs get the same gradient tensor
    build = using(lambda y: (y + y).exp())
    trace = captured(build)
    # THEN their sum needs memory of its own
    assert backward_names(trace) == ["mul", "add"], show(trace)
    assert trace.storages[result_of(trace, only_op(trace, "add", phase="backward"))].bytes == ACTIVATION
    assert_exact(build)


def test_a_shared_buffer_is_copied_once_and_then_written_into() -> None:
    # GIVEN a gradient that reaches y directly and through sin, and another through exp
    build = using(lambda y: y.exp() + (y + y.sin()))
    trace = captured(build)
    assert backward_names(trace) == ["cos", "mul", "add", "mul", "add_"], show(trace)
    assert_exact(build)


def test_an_expanded_buffer_is_not_written_into() -> None:
    # GIVEN that the first gradient to arrive is an expanded view, which is not dense
    build = using(lambda y: y.sum() + y.sin().sum() * torch.ones(()))
    trace = captured(build)
    (addition,) = [op for op in ops(trace, phase="backward") if op_names(trace, [op])[0] in ("add", "add_")]
    (written,) = trace.ops[addition].creates or trace.ops[addition].writes
    assert trace.storages[written].bytes == ACTIVATION
    assert_exact(build)


def test_a_gradient_that_a_hook_keeps_is_not_written_into() -> None:
    # GIVEN a hook that keeps the first gradient that arrives at y in a variable
    def build() -> Step:
        model, inputs, kept = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH), []

        def run() -> None:
            y = model(inputs)
            first, second = y * 1, y * 1
            second.register_hook(kept.append)
            (first.exp() + second.exp()).sum().backward()
            kept.clear()
            model.zero_grad()

        return Step(model, None, run)

    assert_exact(build)


def test_with_create_graph_nothing_is_added_in_place() -> None:
    def build() -> Step:
        model, inputs = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)

        def run() -> None:
            y = model(inputs)
            (gradient,) = torch.autograd.grad((y.exp() + y.tanh()).sum(), inputs, create_graph=True)
            gradient.pow(2).sum().backward()
            model.zero_grad()
            inputs.grad = None

        return Step(model, None, run)

    trace = captured(build)
    in_first = ops(trace, phase="backward")[: len(ops(trace, phase="backward")) // 3]
    assert "add_" not in op_names(trace, in_first), show(trace)
    assert_exact(build)


# Backward formulas that write into zeros ------------------------------------------------------------------


_ROWS = torch.arange(0, ROWS, 2)
_COLUMNS = torch.tensor([[0, 1]]).repeat(ROWS, 1)


@pytest.mark.parametrize(
    ("function", "in_place"),
    [
        pytest.param(lambda y: y[_ROWS.tolist()].exp(), "index_put_", id="index with a list"),
        pytest.param(lambda y: y[torch.arange(0, ROWS, 2)].exp(), "index_put_", id="index"),
        pytest.param(
            lambda y: y.index_select(0, torch.arange(0, ROWS, 2)).exp(), "index_add_", id="index_select"
        ),
        pytest.param(
            lambda y: y.gather(1, torch.zeros(ROWS, 2, dtype=torch.int64)).exp(), "scatter_add_", id="gather"
        ),
        pytest.param(lambda y: y.max(-1).values.exp(), "scatter_", id="max"),
        pytest.param(lambda y: y.topk(2).values.exp(), "scatter_", id="topk"),
    ],
)
def test_the_backward_of_indexing_scatters_into_the_zeros_it_made(
    function: Callable[[torch.Tensor], torch.Tensor], in_place: str
) -> None:
    build = using(function)
    trace = captured(build)
    scatter = only_op(trace, in_place, phase="backward")
    assert trace.ops[scatter].creates == (), show(trace)
    (zeros,) = trace.ops[scatter].writes
    assert trace.storages[zeros].bytes == ACTIVATION
    assert op_names(trace, [trace.storages[zeros].producer]) == ["new_zeros"]
    assert_exact(build)


@pytest.mark.parametrize("rows", [ROWS, 20_000], ids=["known values", "hollow"])
def test_the_gradient_of_a_view_that_was_written_to_is_copied_for_the_formula(rows: int) -> None:
    # GIVEN a write through a mask into a view, whose backward gets a copy of the gradient and zeroes a part
    def hide(y: torch.Tensor) -> torch.Tensor:
        view = y.view(-1)
        view[torch.zeros(rows * WIDTH, dtype=torch.bool)] = 0.0
        return y.exp()

    build = using(hide, rows)
    trace = captured(build)
    # THEN the formula makes a second copy: it writes into zeros of its own only
    zeroing = only_op(trace, "index_put", phase="backward")
    assert trace.storages[result_of(trace, zeroing)].bytes == rows * WIDTH * 4
    assert_exact(build)


def test_a_backward_written_in_python_that_does_not_work_in_place_is_left_alone() -> None:
    # GIVEN a custom function whose backward calls index_add, not index_add_
    class Pick(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x[: ROWS // 2].clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            zeros = gradient.new_zeros(ROWS, WIDTH)
            return zeros.index_add(0, torch.arange(ROWS // 2), gradient)

    build = using(Pick.apply)
    trace = captured(build)
    addition = only_op(trace, "index_add", phase="backward")
    assert trace.storages[result_of(trace, addition)].bytes == ACTIVATION
    assert_exact(build)


# Gradients of parameters ----------------------------------------------------------------------------------


def test_a_parameter_takes_over_the_first_gradient_and_adds_the_next_in_place() -> None:
    # GIVEN two backward passes before the optimizer's step
    def build() -> Step:
        model, inputs = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)

        def run() -> None:
            for _ in range(2):
                model(inputs).exp().sum().backward()
            model.zero_grad()

        return Step(model, None, run)

    trace = captured(build)
    additions = ops(trace, "add_", phase="backward")
    assert len(additions) == 2
    written = [trace.storages[trace.ops[op].writes[0]] for op in additions]
    assert {storage.category for storage in written} == {"gradient"}
    assert sorted(storage.bytes for storage in written) == [WIDTH * 4, WIDTH * WIDTH * 4]
    # No op copies a gradient.
    assert {"clone", "copy_"}.isdisjoint(op_names(trace, ops(trace, phase="backward")))
    assert_exact(build)


def test_the_gradients_of_a_weight_used_twice_arrive_as_views_and_are_not_written_into() -> None:
    # GIVEN a layer that is called twice: each call's weight gradient is a transposed view of a product
    def twice() -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(layer, nn.Tanh(), layer)

    # THEN the engine makes a new tensor for the sum, and that becomes the gradient
    build = training(twice, ROWS, WIDTH)
    trace = captured(build)
    additions = ops(trace, "add", phase="backward")
    assert len(additions) == 2
    assert {trace.storages[result_of(trace, op)].category for op in additions} == {"gradient"}, show(trace)
    assert_exact(build)


# Composites -----------------------------------------------------------------------------------------------


class Linear3D(nn.Module):
    """A linear layer on a 3-D input that is contiguous or not."""

    def __init__(self, contiguous: bool, bias: bool = True) -> None:
        super().__init__()
        self.contiguous = contiguous
        self.layer = nn.Linear(4, 6, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x if self.contiguous else x.transpose(0, 1)).exp()


def test_linear_on_a_contiguous_input_adds_its_bias_within_the_product() -> None:
    build = training(lambda: Linear3D(True), 3, 5, 4)
    trace = captured(build)
    assert op_names(trace, ops(trace, module="Linear3D.layer", phase="forward")) == [
        "view",
        "t",
        "addmm",
        "view",
    ]
    assert_exact(build)


def test_linear_on_a_non_contiguous_input_adds_its_bias_in_place() -> None:
    build = training(lambda: Linear3D(False), 3, 5, 4)
    trace = captured(build)
    layer = op_names(trace, ops(trace, module="Linear3D.layer", phase="forward"))
    assert layer == ["t", "clone", "_unsafe_view", "mm", "_unsafe_view", "add_"], show(trace)
    bias = only_op(trace, "add_", phase="forward")
    assert trace.ops[bias].creates == ()
    assert trace.ops[bias].writes == (result_of(trace, only_op(trace, "mm", phase="forward")),)
    assert_exact(build)


def test_linear_without_bias_needs_no_addition() -> None:
    build = training(lambda: Linear3D(False, bias=False), 3, 5, 4)
    assert {"add", "add_"}.isdisjoint(op_names(captured(build), ops(captured(build), phase="forward")))
    assert_exact(build)
