"""Who holds each storage and for how long, against timelines computed by hand for tiny modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from captured_steps import (
    captured,
    held,
    inside,
    of_category,
    only_op,
    op_names,
    ops,
    result,
    result_of,
    show,
    training,
)
from torch import nn

from trainfit.capturing.random_stream import seeded
from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

pytestmark = pytest.mark.usefixtures("little_garbage")


class TwoLayers(nn.Module):
    """Keeps its intermediate results in variables until it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        active = hidden.relu()
        return self.second(active)


class Residual(nn.Module):
    """Adds its input to what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + torch.tanh(self.inner(x)))


class _Cube(torch.autograd.Function):
    """Saves its input, which backward does not use, and its square, which backward does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        square = x * x
        ctx.save_for_backward(x, square)
        return square * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _, square = ctx.saved_tensors
        return gradient * 3 * square


class Cubed(nn.Module):
    """A linear layer and a custom function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Cube.apply(self.inner(x))


@pytest.fixture(scope="module")
def two_layers() -> Trace:
    return captured(training(TwoLayers, 3, 4))


@pytest.fixture(scope="module")
def dropout_with_adam() -> Trace:
    make_model = lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))  # noqa: E731
    return captured(training(make_model, 3, 4, optimizer=torch.optim.Adam))


def program_lets_go(trace: Trace, op: int) -> int | None:
    """When the program, without autograd, would have released the result of an op."""
    return held(result(trace, op), "program")[0][1]


# Linear, ReLU, Linear -------------------------------------------------------------------------------------


def test_the_ops_of_two_layers_are_those_of_eager_pytorch(two_layers: Trace) -> None:
    forward = ["t", "addmm", "relu", "t", "addmm", "sum", "ones_like"]
    second = ["t", "mm", "t", "mm", "t", "sum", "view", "t"]
    first = ["t", "mm", "t", "sum", "view", "t"]
    backward = ["expand", *second, "threshold_backward", *first]
    assert op_names(two_layers) == [*forward, *backward, "add_", "add_", "add_", "add_"], show(two_layers)


def test_live_bytes_of_two_layers_are_those_computed_by_hand(two_layers: Trace) -> None:
    # GIVEN parameters of 128 + 32 + 64 + 8 bytes and an input of 48
    start = 128 + 32 + 64 + 8 + 48
    hidden = active = 3 * 8 * 4
    output, loss, seed = 3 * 2 * 4, 4, 4
    # WHEN it is replayed
    live = simulate(two_layers).live_bytes
    # THEN forward holds both activations until it returns, and then what ReLU's backward needs
    assert live[:7] == (
        start,
        start + hidden,
        start + hidden + active,
        start + hidden + active,
        start + hidden + active + output,
        start + active + output + loss,
        start + active + loss + seed,
    )
    # AND backward releases the gradient of a layer's output as soon as the layer is done
    kept = start + active + loss + seed
    gradients_of_second = 64 + 8
    assert live[7:16] == (kept, kept, kept + 96, kept + 96, *[kept + 96 + 64] * 2, *[kept + 96 + 72] * 3)
    kept += gradients_of_second
    assert live[16] == kept + 96 + 96
    kept -= active
    assert live[17:23] == (kept + 96, *[kept + 96 + 128] * 2, *[kept + 96 + 160] * 2, kept + 160)
    # AND the optimizer needs nothing of its own
    assert live[23:] == (start + loss + gradients_of_second + 160,) * 4


def test_what_backward_does_not_need_dies_with_the_program(two_layers: Trace) -> None:
    # The variable `hidden` lasts until forward returns, after op 4.
    hidden = result(two_layers, 1)
    assert (hidden.start, hidden.end) == (1, 5)
    assert held(hidden, "program") == [(1, 5)]
    assert held(hidden, "autograd") == []
    assert two_layers.backward_readers(result_of(two_layers, 1)) == ()


def test_a_sequential_releases_each_input_when_the_next_layer_has_run() -> None:
    make_model = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))  # noqa: E731
    trace = captured(training(make_model, 3, 4))
    assert result(trace, only_op(trace, "addmm", module="Sequential.0")).end == 3
    assert program_lets_go(trace, only_op(trace, "relu")) == 5


def test_an_activation_knows_when_python_lets_go_and_who_needs_it_in_backward(two_layers: Trace) -> None:
    # GIVEN the result of ReLU, which ReLU's own backward and the second layer's backward need
    relu = only_op(two_layers, "relu")
    active = result(two_layers, relu)
    # THEN the program alone would have released it when forward returned
    assert program_lets_go(two_layers, relu) == 5
    # AND autograd saves it twice: once as ReLU's result, once as the layer's input
    assert held(active, "autograd") == [(3, 17), (4, 15)]
    # AND backward reads it in the product that makes the weight's gradient, and in ReLU's backward
    second_weight_gradient = ops(two_layers, "mm", module="TwoLayers.second")[1]
    relu_backward = only_op(two_layers, "threshold_backward")
    assert two_layers.backward_readers(result_of(two_layers, relu)) == (second_weight_gradient, relu_backward)
    assert active.end == relu_backward + 1


def test_a_weight_is_saved_only_where_the_gradient_of_the_input_is_wanted(two_layers: Trace) -> None:
    parameters = of_category(two_layers, "parameter")
    assert [held(parameter, "autograd") for parameter in parameters] == [[], [], [(4, 15)], []]


def test_the_input_is_held_by_the_program_and_saved_for_the_weight_gradient(two_layers: Trace) -> None:
    (inputs,) = of_category(two_layers, "input")
    assert (inputs.bytes, inputs.start, inputs.end) == (48, -1, None)
    assert held(inputs, "program") == [(-1, None)]
    assert held(inputs, "autograd") == [(1, 22)]


def test_gradients_are_held_from_their_arrival_until_zero_grad(two_layers: Trace) -> None:
    gradients = of_category(two_layers, "gradient")
    # The transposed weight gradient arrives one view after it is made; the bias gradient arrives at once.
    assert [gradient.bytes for gradient in gradients] == [64, 8, 128, 32]
    assert [held(gradient, "gradient") for gradient in gradients] == [
        [(16, 27)],
        [(15, 27)],
        [(23, 27)],
        [(22, 27)],
    ]
    assert {gradient.end for gradient in gradients} == {len(two_layers.ops)}


def test_the_loss_that_run_returns_lives_beyond_the_step(two_layers: Trace) -> None:
    loss = result(two_layers, only_op(two_layers, "sum", phase="forward"))
    assert (loss.bytes, loss.end) == (4, None)


# Residual, custom function, dropout -----------------------------------------------------------------------


def test_a_residual_holds_its_input_for_the_sum_and_for_backward() -> None:
    # GIVEN x -> tanh(x + tanh(inner(x))) after a linear layer
    trace = captured(training(lambda: nn.Sequential(nn.Linear(4, 4), Residual()), 3, 4))
    assert op_names(trace, range(8)) == ["t", "addmm", "t", "addmm", "tanh", "add", "tanh", "sum"]
    # THEN the first layer's result is the program's until the residual returns, autograd's for `inner`
    x = result(trace, 1)
    inner_backward = ops(trace, phase="backward", module="Sequential.1.inner")
    assert held(x, "program")[0] == (1, 7)
    assert [start for start, _ in held(x, "autograd")] == [3]
    (reader,) = trace.backward_readers(result_of(trace, 1))
    assert op_names(trace, [reader]) == ["mm"]
    assert reader in inner_backward
    # AND what tanh was applied to dies in forward, what tanh returned is saved
    assert result(trace, 3).end == 5
    assert result(trace, 5).end == 7
    assert [held(result(trace, 4), "autograd"), held(result(trace, 6), "autograd")] == [[(5, 12)], [(7, 11)]]
    # AND the two gradients of x are added in place
    (addition,) = ops(trace, "add_", phase="backward")
    assert trace.ops[addition].creates == ()


def test_a_custom_function_holds_what_it_saved_even_if_backward_does_not_read_it() -> None:
    trace = captured(training(Cubed, 3, 4))
    assert op_names(trace, range(4)) == ["t", "addmm", "mul", "mul"]
    x, square = result(trace, 1), result(trace, 2)
    # Both are saved when `apply` returns, and released when the node has run, after two products.
    assert op_names(trace, [7, 8]) == ["mul", "mul"]
    assert held(x, "autograd") == held(square, "autograd") == [(4, 9)]
    assert program_lets_go(trace, 1) == program_lets_go(trace, 2) == 4
    # Only the square is read.
    assert trace.backward_readers(result_of(trace, 1)) == ()
    assert trace.backward_readers(result_of(trace, 2)) == (8,)
    # What comes between belongs to nobody but the program.
    assert held(result(trace, 3), "autograd") == []


def test_dropout_saves_its_mask_and_not_its_input(dropout_with_adam: Trace) -> None:
    trace = dropout_with_adam
    names = ["t", "addmm", "empty_like", "bernoulli_", "div_", "mul", "sum"]
    assert op_names(trace, range(7)) == names
    # The input is needed for the product with the mask (op 5) and no longer.
    layer = result(trace, 1)
    assert (layer.end, held(layer, "autograd")) == (6, [])
    # The mask is made, filled and scaled in place; the CPU's has the tensor's dtype.
    mask = result(trace, 2)
    assert mask.bytes == 3 * 4 * 4
    assert trace.ops[3].writes == trace.ops[4].writes == (result_of(trace, 2),)
    assert held(mask, "autograd") == [(5, 10)]
    assert trace.backward_readers(result_of(trace, 2)) == (9,)
    assert program_lets_go(trace, 2) == 6


def test_optimizer_state_is_held_by_the_optimizer_all_the_time(dropout_with_adam: Trace) -> None:
    states = of_category(dropout_with_adam, "optimizer_state")
    # A step counter and two averages, for a weight of 64 bytes and a bias of 16.
    assert [state.bytes for state in states] == [4, 64, 64, 4, 16, 16]
    for state in states:
        assert held(state, "optimizer") == held(state, "program") == [(-1, None)]
        assert held(state, "autograd") == []


def test_the_optimizers_scratch_memory_is_temporary(dropout_with_adam: Trace) -> None:
    made = [result(dropout_with_adam, op) for op in ops(dropout_with_adam, phase="optimizer")
            if dropout_with_adam.ops[op].creates]  # fmt: skip
    # sqrt and quotient of the second average, per parameter
    assert [(storage.category, storage.bytes) for storage in made] == [
        ("temporary", 64),
        ("temporary", 64),
        ("temporary", 16),
        ("temporary", 16),
    ]


# Gradients that stay --------------------------------------------------------------------------------------


def test_a_gradient_that_stays_after_the_step_is_persistent_and_added_to() -> None:
    # GIVEN a step that zeroes gradients in place
    def build() -> Step:
        model, inputs = nn.Linear(4, 4), torch.randn(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def run() -> None:
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        return Step(model, optimizer, run)

    trace = captured(build)
    # THEN the gradients were there before and hold until after
    gradients = [storage for storage in of_category(trace, "gradient") if storage.persistent]
    assert sorted(gradient.bytes for gradient in gradients) == [16, 64]
    assert all(held(gradient, "gradient") == [(-1, None)] for gradient in gradients)
    # AND this step's are temporary: each is added to the old one, and freed
    additions = ops(trace, "add_", phase="backward")
    assert len(additions) == 2
    for addition in additions:
        (written,) = trace.ops[addition].writes
        assert trace.storages[written] in gradients


def test_a_gradient_that_autograd_cannot_take_over_is_copied() -> None:
    # GIVEN a sum over the parameter itself: its gradient is an expanded view, which autograd must copy
    class Bias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.bias

    trace = captured(training(Bias, 1))
    copy = only_op(trace, "new_empty_strided", phase="backward")
    assert op_names(trace, [copy + 1]) == ["copy_"]
    # THEN the copy is the gradient, the view's memory is not
    (gradient,) = of_category(trace, "gradient")
    assert gradient is result(trace, copy)
    assert gradient.bytes == 20
    assert held(gradient, "gradient") == [(copy, len(trace.ops))]


# Values ---------------------------------------------------------------------------------------------------


def _loss_and_gradients(make_model: Any) -> list[Any]:
    model = make_model()
    inputs = torch.randn(3, 4)
    loss = model(inputs).pow(2).mean()
    loss.backward()
    return [loss.item(), *[parameter.grad.tolist() for parameter in model.parameters()]]


@pytest.mark.parametrize("make_model", [TwoLayers, Residual, Cubed])
def test_a_model_small_enough_to_be_known_gets_its_real_loss_and_gradients(make_model: Any) -> None:
    # Saving metadata only, and making the tensor again, must not lose the values.
    with seeded():
        wanted = _loss_and_gradients(make_model)
    assert inside(lambda: _loss_and_gradients(make_model)) == wanted
