"""The loss in chunks is the usual loss, and so are its gradients; what else is done with logits works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainfit.changes import chunked_cross_entropy
from trainfit.changes.change import NotPossible
from trainfit.changes.chunked_head import Logits, chunk_loss, head_of

CLASSES, WIDTH, TOKENS = 1100, 24, 300


class Model(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)

    def forward(self, hidden: Tensor) -> Any:
        return self.head(self.body(hidden))


def by_rows(logits: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.reshape(-1))


def shifted(logits: Any, labels: Tensor) -> Tensor:
    """As language models were trained for long."""
    kept, next_ones = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return F.cross_entropy(kept.view(-1, kept.size(-1)), next_ones.view(-1))


def summed(logits: Any, labels: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=7, reduction="sum")
    return loss / 50


def smoothed(logits: Any, labels: Tensor) -> Tensor:
    """Nothing that chunks do: the logits are computed."""
    return F.cross_entropy(logits.view(-1, CLASSES), labels.reshape(-1), label_smoothing=0.1)


def squared(logits: Any, labels: Tensor) -> Tensor:
    return torch.square(logits).mean() + logits.softmax(-1).max()


def results(loss_of: Callable[[Any, Tensor], Tensor], bias: bool, chunked: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model(bias).double()
    hidden = torch.randn(3, TOKENS // 3, WIDTH, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(CLASSES, (3, TOKENS // 3))
    labels[0, :9], labels[1, 3] = -100, 7
    if loss_of is summed:
        labels[labels == -100] = 7
    if chunked:
        chunk_loss(model)
    loss = loss_of(model(hidden), labels)
    (2 * loss).backward()
    assert hidden.grad is not None
    return [loss.detach(), hidden.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss_of", [by_rows, shifted, summed, smoothed, squared])
def test_loss_and_gradients_are_those_of_the_whole(
    loss_of: Callable[[Any, Tensor], Tensor], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_cross_entropy, "_LEAST_TOKENS", 32)
    whole, parts = results(loss_of, bias, False), results(loss_of, bias, True)
    assert len(whole) == len(parts) == 5 + bias
    for one, other in zip(whole, parts):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_the_logits_are_never_there_together(monkeypatch: pytest.MonkeyPatch) -> None:
    largest: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest.append(result.numel())
            return result

    monkeypatch.setattr(chunked_cross_entropy, "_LEAST_TOKENS", 16)
    model = Model()
    chunk_loss(model)
    with Sizes():
        by_rows(model(torch.randn(3, 100, WIDTH)), torch.randint(CLASSES, (3, 100))).backward()
    assert max(largest) < 300 * CLASSES / 10


def test_under_autocast_products_are_in_its_dtype() -> None:
    losses = []
    for chunked in (False, True):
        torch.manual_seed(0)
        model = Model()
        if chunked:
            chunk_loss(model)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(torch.randn(2, 20, WIDTH))
            assert logits.dtype is torch.bfloat16
            loss = by_rows(logits.float(), torch.randint(CLASSES, (2, 20)))
        loss.backward()
        assert loss.dtype is torch.float32
        assert model.head.weight.grad is not None and model.head.weight.grad.dtype is torch.float32
        losses.append((loss.item(), model.head.weight.grad))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-3)
    torch.testing.assert_close(losses[0][1], losses[1][1], rtol=0.05, atol=1e-4)


def test_without_gradients_the_head_is_as_ever_and_undone_it_is_gone() -> None:
    model = Model()
    undo = chunk_loss(model)
    with torch.no_grad():
        assert isinstance(model(torch.randn(2, 4, WIDTH)), Tensor)
    model.eval()
    assert isinstance(model(torch.randn(2, 4, WIDTH)), Tensor)
    model.train()
    assert isinstance(model(torch.randn(2, 4, WIDTH)), Logits)
    undo()
    assert isinstance(model(torch.randn(2, 4, WIDTH)), Tensor)
    assert "forward" not in vars(model.head)


def test_a_model_without_a_known_head_says_so() -> None:
    model = nn.Sequential(nn.Linear(4, 2000))
    assert head_of(model) is None
    with pytest.raises(NotPossible, match="no linear layer that is known to be its head"):
        chunk_loss(model)
