"""In-place writes to what autograd has saved: refused and allowed exactly where a real run does so."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captured_steps import Build, captured, inside
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainfit.capturing.hollow import write_counter
from trainfit.errors import CaptureError
from trainfit.steps.step import Step

pytestmark = pytest.mark.usefixtures("little_garbage")

ROWS = 8
SIZES = pytest.mark.parametrize("width", [8, 300], ids=["known values", "hollow"])


def using(function: Callable[[Tensor], Tensor], width: int) -> Build:
    """Return a build whose model applies `function` to the result of a linear layer."""

    class Using(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return function(self.layer(x))

    def build() -> Step:
        model, inputs = Using(), torch.randn(ROWS, width)
        return Step.of(model, inputs, loss=torch.sum)

    return build


def real_run_refuses(build: Build) -> bool:
    step = build()
    try:
        step.run()
        step.run()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return True
    return False


def capture_refuses(build: Build) -> bool:
    try:
        captured(build)
    except CaptureError as error:
        assert "modified in place" in str(error)
        return True
    return False


def result_of_its_own_node(x: Tensor) -> Tensor:
    y = x.exp()
    y += 1
    return y


def through_a_view(x: Tensor) -> Tensor:
    y = x.sigmoid()
    y.view(-1).mul_(2)
    return y


def through_a_view_that_outlives_its_base(x: Tensor) -> Tensor:
    y = x.sigmoid()
    flat = y.view(-1)
    del y
    return flat.mul_(2)


def through_a_detached_tensor(x: Tensor) -> Tensor:
    y = x.sigmoid()
    total, detached = y.sum(), y.detach()
    del y
    detached.mul_(2)
    return total


def without_gradients(x: Tensor) -> Tensor:
    y = x * 1
    z = y.pow(2)
    with torch.no_grad():
        y.copy_(x)
    return z


def one_row(x: Tensor) -> Tensor:
    y = x.clone()
    z = y.pow(2)
    y[0] = 0
    return z


def with_out(x: Tensor) -> Tensor:
    y = x * 1
    z = y.pow(2)
    with torch.no_grad():
        torch.add(x, 1, out=y)
    return z


def in_a_checkpoint(x: Tensor) -> Tensor:
    return checkpoint(result_of_its_own_node, x, use_reentrant=True)  # type: ignore[no-any-return]


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y


def saved_by_a_function(x: Tensor) -> Tensor:
    y: Tensor = Exponential.apply(x)
    y += 1
    return y


@SIZES
@pytest.mark.parametrize(
    "function",
    [
        result_of_its_own_node,
        through_a_view,
        through_a_view_that_outlives_its_base,
        through_a_detached_tensor,
        without_gradients,
        one_row,
        with_out,
        in_a_checkpoint,
        saved_by_a_function,
    ],
)
def test_what_a_real_run_refuses_is_refused(function: Callable[[Tensor], Tensor], width: int) -> None:
    assert real_run_refuses(using(function, width))
    assert capture_refuses(using(function, width))


def before_it_is_saved(x: Tensor) -> Tensor:
    return (x + 1).add_(1).tanh_()


def through_data(x: Tensor) -> Tensor:
    y = x.sigmoid()
    y.data.mul_(2)
    return y


def of_a_copy(x: Tensor) -> Tensor:
    y = x.softmax(-1).clone()
    return y.div_(2)


def of_what_nobody_saved(x: Tensor) -> Tensor:
    y = x * 1
    both = torch.cat([y, y])
    y.add_(1)
    return both


def row_by_row(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for row in range(ROWS):
        y[row] = x[row] * row
    return y


def with_new_data(x: Tensor) -> Tensor:
    y = x * 1
    z = y.pow(2)
    y.data = torch.zeros_like(x)
    return z


def under_hooks_of_the_user(x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return result_of_its_own_node(x)


def in_a_checkpoint_with_hooks(x: Tensor) -> Tensor:
    return checkpoint(result_of_its_own_node, x, use_reentrant=False)  # type: ignore[no-any-return]


def dropout_in_place(x: Tensor) -> Tensor:
    return F.dropout(x * 1, 0.5, inplace=True)


@SIZES
@pytest.mark.parametrize(
    "function",
    [
        before_it_is_saved,
        through_data,
        of_a_copy,
        of_what_nobody_saved,
        row_by_row,
        with_new_data,
        under_hooks_of_the_user,
        in_a_checkpoint_with_hooks,
        dropout_in_place,
    ],
)
def test_what_a_real_run_allows_is_allowed(function: Callable[[Tensor], Tensor], width: int) -> None:
    assert not real_run_refuses(using(function, width))
    assert not capture_refuses(using(function, width))


@SIZES
@pytest.mark.parametrize("again", [True, False])
def test_a_backward_through_weights_that_were_updated(again: bool, width: int) -> None:
    """The usual mistake with two losses: the optimizer steps between their backwards."""

    def build() -> Step:
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
        inputs, optimizer = torch.randn(ROWS, width), torch.optim.SGD(model.parameters(), lr=0.1)

        def run() -> Tensor:
            loss = model(inputs).sum()
            loss.backward(retain_graph=again)
            optimizer.step()
            if again:
                loss.backward()
            optimizer.zero_grad()
            return loss

        return Step(model, optimizer, run)

    assert real_run_refuses(build) == capture_refuses(build) == again


def test_the_message_names_the_write_and_who_needs_the_tensor() -> None:
    class Shift(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.act, self.shift = nn.Linear(300, 300), nn.Sigmoid(), Shift()

        def forward(self, x: Tensor) -> Tensor:
            return self.shift(self.act(self.layer(x)))  # type: ignore[no-any-return]

    def build() -> Step:
        model, inputs = Net(), torch.randn(ROWS, 300)

        def run() -> Tensor:
            loss = model(inputs).sum()
            loss.backward()
            return loss

        return Step(model, None, run)

    with pytest.raises(CaptureError) as caught:
        captured(build)
    message = str(caught.value)
    assert message.startswith("backward at tests/capturing/test_in_place_writes.py:")
    assert (
        "needs a tensor (float32 [8, 300]) that was modified in place by aten.add_.Tensor in Net.shift"
        in message
    )
    assert "after SigmoidBackward0 in Net.act had saved it" in message
    assert "\n" not in message


def test_the_counter_of_writes_holds_no_memory() -> None:
    def question() -> tuple[bool, int, int]:
        y = torch.ones(300, 300)
        counter, storage = write_counter(y), weakref.ref(y.untyped_storage())
        y.add_(1)
        y[0].zero_()
        versions = (counter._version, y._version)
        del y
        return (storage() is None, *versions)

    assert inside(question) == (True, 2, 2)
