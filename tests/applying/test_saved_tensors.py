"""What autograd saves of a region: dropped and computed again as torch's own checkpoint does it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from planned_models import TRANSFORMER, outcome
from plans import as_a_whole, save_products
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from trainfit.applying import applied, plain_checkpoint, region
from trainfit.applying.saved_tensors import SavedTensors

Function = Callable[[torch.Tensor], torch.Tensor]
WEIGHT = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))


def ours(function: Function, x: torch.Tensor) -> torch.Tensor:
    saved = SavedTensors(lambda: function(x))
    with saved_tensors_hooks(saved.pack, saved.unpack):
        return function(x)


def torchs(function: Function, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(function, x, use_reentrant=False)
    return result


def given() -> torch.Tensor:
    return torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()


def several(x: torch.Tensor) -> torch.Tensor:
    """Save inputs, results, views and what has no history."""
    h = (x @ WEIGHT).tanh().exp()
    a, b = h.t().chunk(2)
    return (a * b.sigmoid() * WEIGHT[:3]).sum()


def reshaped_in_place(x: torch.Tensor) -> torch.Tensor:
    """Give a tensor another shape after it was saved."""
    h = x * 2
    y = h.sin()
    h.t_()
    return (y * h).sum()


def differentiated(x: torch.Tensor) -> torch.Tensor:
    """Run a backward inside of forward."""
    h = x.exp() * x
    (gradient,) = torch.autograd.grad(h.sum(), x, create_graph=True)
    return (gradient * h.tanh()).sum()


def checkpointed_inside(x: torch.Tensor) -> torch.Tensor:
    return torchs(several, x.sin()) * torchs(lambda y: y.exp().sum(), x.cos())


def half_precise(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ WEIGHT).float().tanh().sum()


FUNCTIONS = (several, reshaped_in_place, differentiated, checkpointed_inside, half_precise)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: str(function.__name__))
def test_gradients_are_those_of_torchs_own(function: Function) -> None:
    def gradients(run: Callable[[Function, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        x = given()
        loss = run(function, x)
        first = torch.autograd.grad(loss, x, retain_graph=True)
        (again,) = torch.autograd.grad(loss, x, create_graph=True)
        return [loss, *first, again, *torch.autograd.grad(again.square().sum(), x)]

    for one, other in zip(gradients(ours), gradients(torchs), strict=True):
        assert torch.equal(one, other)


def test_autocast_is_what_it_was_in_forward() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        h = x @ WEIGHT
        seen.append((h.dtype, torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
        return h.tanh().tanh().float().sum()

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        within = ours(function, given())
    outside = ours(function, given())
    within.backward()
    with torch.autocast("cpu", torch.bfloat16):
        outside.backward()
    half, full = (torch.bfloat16, True, False), (torch.float32, False, True)
    assert seen == [half, full, half, full]


def test_what_is_computed_again_goes_as_soon_as_backward_has_used_it() -> None:
    counts: list[int] = []

    def held() -> int:
        alive = [saved for each in tensors._saved if (saved := each()) is not None]
        return sum(len(saved.again) for saved in alive)

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x.exp()
            if len(tensors._saved) < 5:
                x.register_hook(lambda _: counts.append(held()))
            x.sin()  # saves a tensor that nobody will ask for
        return x.sum()

    x = given()
    tensors = SavedTensors(lambda: function(x))
    with saved_tensors_hooks(tensors.pack, tensors.unpack):
        loss = function(x)
    assert len(tensors._saved) == 8 and held() == 0
    loss.backward(retain_graph=True)
    # When backward comes to the second result, the fourth and third have been asked for, and so on.
    assert counts == [2, 1] and held() == 0


@pytest.mark.parametrize(
    ("first", "again", "words"),
    [
        (lambda x: x.exp(), lambda x: x.exp()[:2], r"number 2 is \[2, 6\].*was \[6, 6\]"),
        (lambda x: x.exp().sin(), lambda x: x.detach(), r"saved 1 tensors, and 4 in forward"),
        (lambda x: x.exp(), lambda x: x.exp().double(), r"float64.*was .*float32"),
    ],
)
def test_another_course_in_backward_is_refused(first: Function, again: Function, words: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        way = ways.pop(0)
        return way(x.exp()).square().sum()

    # Torch's own refuses the same.
    for run, message in ((ours, words), (torchs, "different (number|metadata)")):
        ways = [first, again]
        with pytest.raises(CheckpointError, match=message):
            run(function, given()).backward()


def test_code_that_goes_on_after_the_last_tensor_is_stopped() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            h = x.exp().sin()
        except Exception:
            h = x.exp().cos()
        return h.sum()

    with pytest.raises(CheckpointError, match="did something else"):
        ours(function, given()).backward()


def test_a_tensor_that_is_asked_for_twice_is_an_error() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.saved_tensors[0] * ctx.saved_tensors[0]

    for run in (ours, torchs):
        with pytest.raises(CheckpointError, match=r"twice|already"):
            run(lambda x: Twice.apply(x).sum(), given()).backward()  # type: ignore[no-untyped-call]


def test_a_node_of_the_graph_may_be_looked_at_any_time() -> None:
    x = given()
    result = ours(lambda x: x.exp(), x)
    node: Any = result.grad_fn
    assert torch.equal(node._saved_result, x.exp())
    assert torch.equal(node._saved_result, x.exp())
    result.sum().backward()


class Listening(TorchDispatchMode):
    """Lets every op pass."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


WATCHED: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "hooks": lambda: saved_tensors_hooks(unchanged, unchanged),
    "mode": lambda: Listening(),  # type: ignore[no-untyped-call]
    "device": lambda: torch.device("cpu"),
    "all of it": lambda: set_checkpoint_early_stop(False),
}


@pytest.fixture
def of_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The regions that were left to torch's own checkpoint."""
    found: list[Any] = []

    def noted(function: Any, *args: Any, **options: Any) -> Any:
        found.append(function)
        return checkpoint(function, *args, **options)

    for module in (region, plain_checkpoint):
        monkeypatch.setattr(module, "checkpoint", noted)
    yield found


@pytest.mark.parametrize("policy", [save_products, as_a_whole])
@pytest.mark.parametrize("who", ["nobody", *WATCHED])
def test_torchs_own_runs_where_someone_watches(who: str, policy: Any, of_torch: list[Any]) -> None:
    plan, watched = TRANSFORMER.plan(policy), WATCHED.get(who, contextlib.nullcontext)
    plain, inputs = TRANSFORMER.new()
    model, _ = TRANSFORMER.new()
    without = outcome(plain, lambda: plain(inputs), steps=3)
    with applied(model, plan), watched():
        with_plan = outcome(model, lambda: model(inputs), steps=3)
    assert without.differences(with_plan) == []
    assert bool(of_torch) is (who != "nobody")


def test_regions_nobody_watches_are_freed_with_their_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(2, 4)
    call: list[weakref.ref[Any]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x)
        return result

    saved = SavedTensors(lambda: function(x))
    call.append(weakref.ref(saved))
    with saved_tensors_hooks(saved.pack, saved.unpack):
        loss = function(x).sum()
    del saved
    assert call[0]() is not None
    loss.backward()
    del loss
    assert call[0]() is None
