"""Updates in backward give the parameters that updates after it give, bit by bit, or are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainfit
from trainfit.changes.change import NotPossible
from trainfit.changes.updates_in_backward import update_in_backward

Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def model_and_batch() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.LayerNorm(16))
    model[3].bias.requires_grad_(False)
    return model, torch.randn(8, 16)


def trained(make: Optimizer, in_backward: bool, steps: int = 4) -> tuple[list[Tensor], dict[str, Any]]:
    model, batch = model_and_batch()
    groups = [{"params": list(model[:2].parameters()), "lr": 0.03}, {"params": list(model[2:].parameters())}]
    optimizer = make(groups)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if in_backward:
        update_in_backward(model, [optimizer])
    for _ in range(steps):
        model(batch).square().mean().backward()
        if in_backward:
            assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return [p.detach() for p in model.parameters()], optimizer.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_and_state_are_bit_equal(name: str) -> None:
    after, state = trained(OPTIMIZERS[name], in_backward=False)
    during, state_during = trained(OPTIMIZERS[name], in_backward=True)
    assert all(torch.equal(one, other) for one, other in zip(after, during))
    assert state["param_groups"] == state_during["param_groups"]
    for number, values in state["state"].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(state_during["state"][number][key]))


def test_a_second_gradient_before_the_step_is_an_error() -> None:
    model, batch = model_and_batch()
    update_in_backward(model, [torch.optim.AdamW(model.parameters())])
    model(batch).sum().backward()
    with pytest.raises(RuntimeError, match="cannot be accumulated"):
        model(batch).sum().backward()


def test_removed_it_leaves_gradients_alone() -> None:
    model, batch = model_and_batch()
    (update,) = update_in_backward(model, [torch.optim.AdamW(model.parameters())])
    update.remove()
    model(batch).sum().backward()
    assert model[0].weight.grad is not None


@pytest.mark.parametrize(
    ("between", "message"),
    [
        (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3), "clipped, scaled or written to"),
        (lambda model: model(torch.randn(8, 16)).sum().backward(), "accumulated over several backwards"),
    ],
)
def test_what_comes_between_gradients_and_updates_is_noticed_in_the_first_step(
    between: Callable[[nn.Module], Any], message: str
) -> None:
    model, batch = model_and_batch()
    optimizer = torch.optim.AdamW(model.parameters())
    update_in_backward(model, [optimizer], first_looks=True)
    with pytest.raises(NotPossible, match=message):
        model(batch).sum().backward()
        between(model)
        optimizer.step()


def test_an_optimizer_that_lacks_parameters_or_is_not_torchs_is_refused() -> None:
    model, _ = model_and_batch()
    with pytest.raises(NotPossible, match="does not have all parameters"):
        update_in_backward(model, [torch.optim.AdamW(model[0].parameters())])

    class Own(torch.optim.SGD):
        pass

    with pytest.raises(NotPossible, match="not one of torch's optimizers"):
        update_in_backward(model, [Own(model.parameters(), lr=0.1)])


def test_gradients_of_one_layer_at_a_time_are_what_the_capture_sees() -> None:
    """Eight layers of one MiB: without it all eight gradients are there, with it never more than two."""

    def build(in_backward: bool) -> trainfit.Step:
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        if in_backward:
            update_in_backward(model, [optimizer])
        batch = torch.randn(4, 512)
        return trainfit.Step.of(model, batch, loss=lambda out: out.sum(), optimizer=optimizer)

    peaks = {}
    for in_backward in (False, True):
        trace = trainfit.capture(functools.partial(build, in_backward), device="cpu")
        estimate = trainfit.estimate(trace, device="cpu")
        peaks[in_backward] = estimate.peak_bytes - trace.persistent_bytes
    assert peaks[False] > 8 << 20
    assert peaks[True] < 2.2 * (1 << 20)
