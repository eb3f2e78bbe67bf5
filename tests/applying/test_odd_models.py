"""Models as people write them: shared and tied parts, buffers, hooks, adapters, autocast and checkpoints.

Each one computes bitwise the same with plans, in training with two batch sizes, and in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planned_models import Outcome, Subject, outcome
from plans import as_a_whole, plan_for, recompute_everything, save_everything, save_products
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainfit.applying import apply
from trainfit.plans.plan import Plan

WIDTH = 8


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks in a row between a linear layer and a loss."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@dataclass
class Result:
    hidden: torch.Tensor
    losses: dict[str, torch.Tensor]


class NestedArguments(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, loss = self.first(x), torch.zeros(())
        for block in self.blocks:
            result = block({"inputs": {"hidden": hidden, "masks": [x > 0, None]}}, options=(1, "text"))
            hidden, loss = result.hidden, loss + result.losses["extra"]
        return hidden.square().mean() + loss


class TakesNested(FeedForward):
    def forward(self, batch: Any, options: Any = None) -> Result:  # type: ignore[override]
        hidden = super().forward(batch["inputs"]["hidden"]) * batch["inputs"]["masks"][0]
        return Result(hidden.tanh(), {"extra": hidden.square().mean()})


class WritesToItsInput(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        x.add_(1.0)
        return F.leaky_relu_(super().forward(x) * 2.0)


class RunningMean(FeedForward):
    """One buffer is written to in place, one is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.flatten(0, -2).mean(0), alpha=0.1)
        self.count = self.count + 1
        return super().forward((x - self.mean) / self.count)


class Adapted(nn.Module):
    """A frozen layer and two thin matrices beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.dropout = layer.requires_grad_(False), nn.Dropout(0.1)
        self.thin = nn.Linear(layer.in_features, 2, bias=False)
        self.wide = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.wide(self.thin(self.dropout(x))) * 2.0


class CastsInside(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return super().forward(hidden.float())


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.reentrant = FeedForward(), FeedForward(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(checkpoint(self.inner, x, use_reentrant=self.reentrant))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(FeedForward() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            out.index_add_(0, row, expert(rows[row]) * weights[row, place, None])
        return x + out.view_as(x)


class StraightThrough(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = super().forward(x)
        hidden = super().forward(x)
        return hidden + (target.round() - hidden).detach() * 0.1


class MappedOver(FeedForward):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = {name: value * 1.1 for name, value in self.up.named_parameters()}
        hidden = torch.func.functional_call(self.up, scaled, (x,))
        return super().forward(torch.func.vmap(torch.sin)(hidden[..., :WIDTH]))


def hooked() -> nn.Module:
    model = Stack(FeedForward(), FeedForward(), FeedForward())
    blocks = model.blocks
    blocks[0].register_forward_hook(lambda module, args, output: output * 1.5)
    blocks[1].register_forward_pre_hook(lambda module, args: (args[0].sin(),))
    blocks[1].up.register_forward_hook(lambda module, args, output: output.cos())
    blocks[2].down.register_forward_pre_hook(lambda module, args: (args[0] * 2.0,))
    blocks[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    return model


def adapted() -> nn.Module:
    model = Stack(FeedForward(), FeedForward()).requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


def shared() -> nn.Module:
    block = FeedForward()
    return Stack(block, FeedForward(), block, block)


def tied() -> nn.Module:
    model = Stack(FeedForward(), FeedForward())
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.first.weight = nn.Parameter(model.first.weight.detach())
    return model


def parametrized() -> nn.Module:
    model = Stack(FeedForward(), FeedForward())
    nn.utils.parametrizations.spectral_norm(model.blocks[0].up)
    nn.utils.parametrizations.weight_norm(model.blocks[1].down)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nested arguments and dataclasses": lambda: NestedArguments(TakesNested(), TakesNested()),
    "shared modules": shared,
    "in-place ops on inputs": lambda: Stack(WritesToItsInput(), WritesToItsInput()),
    "hooks that change values": hooked,
    "tied weights": tied,
    "buffers updated in forward": lambda: Stack(RunningMean(), RunningMean()),
    "parametrizations": parametrized,
    "adapters": adapted,
    "autocast inside": lambda: Stack(CastsInside(), CastsInside()),
    "checkpoint inside": lambda: Stack(Checkpointed(reentrant=False), Checkpointed(reentrant=False)),
    "reentrant checkpoint inside": lambda: Stack(Checkpointed(reentrant=True), Checkpointed(reentrant=True)),
    "experts": lambda: Stack(Experts(), Experts()),
    "gradients that stop": lambda: Stack(StraightThrough(), StraightThrough()),
    "functional calls": lambda: Stack(MappedOver(), MappedOver()),
}


def outcomes(subject: Subject, plan: Plan | None) -> list[Outcome]:
    """Train two steps, then two with a smaller batch, then evaluate."""
    model, inputs = subject.new()
    if plan is not None:
        apply(model, plan)
    smaller = inputs[:-1]
    found = [outcome(model, lambda: model(inputs), 2), outcome(model, lambda: model(smaller), 2)]
    model.eval()
    return [*found, outcome(model, lambda: model(inputs))]


@pytest.mark.filterwarnings("ignore:.*does not do what its plan says")
@pytest.mark.parametrize("name", MODELS)
def test_it_computes_the_same(name: str) -> None:
    subject = Subject(MODELS[name], lambda: torch.randn(3, 5, WIDTH), ())
    trace = subject.trace()
    root = type(subject.new()[0]).__name__
    expected = outcomes(subject, None)
    for regions in ([f"{root}.blocks.{number}" for number in range(4)], [root]):
        for policy in (recompute_everything, as_a_whole, save_products, save_everything):
            found = outcomes(subject, plan_for(trace, regions, policy))
            assert [one.differences(other) for one, other in zip(expected, found)] == [[], [], []]
