"""Small models, and what they compute with and without a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from plans import Policy, plan_for
from torch import nn

from trainfit.applying import applied
from trainfit.capturing import capture
from trainfit.capturing.random_stream import seeded
from trainfit.plans.plan import Plan
from trainfit.steps.step import Step
from trainfit.traces.trace import Trace


class Block(nn.Module):
    """Attention and a feed-forward part, with dropout."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.2)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attend(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        dropout = 0.1 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    def __init__(self, blocks: int = 2, width: int = 16, words: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class InPlacePart(nn.Module):
    """In-place ops on results, on views of them, and on the module's own input."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu_()
        h = h.mul(2.0).add_(1.0)
        before = h.exp()
        h.sub_(0.5)
        h[:, :4].mul_(3.0)
        y = torch.zeros_like(h)
        y[:, 1:] = self.second(h)[:, 1:]
        y += before
        z = F.dropout(self.third(y), 0.3, self.training, inplace=True)
        return F.leaky_relu(z, inplace=True)


class InPlaceMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(InPlacePart(), InPlacePart())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x).square().mean()


class ConvNet(nn.Module):
    """Convolutions, batch norm with running statistics, in-place activations, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(self.part(3, 4), self.part(4, 6))
        self.head = nn.Linear(6, 5)

    @staticmethod
    def part(before: int, after: int) -> nn.Sequential:
        convolution = nn.Conv2d(before, after, 3, padding=1)
        return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True), nn.MaxPool2d(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.parts(images).mean((2, 3))).logsumexp(1).mean()


@dataclass(frozen=True)
class Subject:
    """A model, what goes into it, and the modules that tests make regions of."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    regions: Sequence[str]
    run: Callable[[nn.Module, Any], torch.Tensor] = lambda model, inputs: model(inputs)

    def build(self) -> Step:
        """Build a whole step, as a user would."""
        model, inputs = self.make(), self.inputs()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def run() -> torch.Tensor:
            loss = self.run(model, inputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return Step(model, optimizer, run)

    def trace(self) -> Trace:
        return capture(self.build)

    def plan(self, policy: Policy) -> Plan:
        return plan_for(self.trace(), self.regions, policy)

    def new(self) -> tuple[nn.Module, Any]:
        """Return a model and inputs that are the same each time."""
        with seeded():
            return self.make(), self.inputs()


@dataclass
class Outcome:
    """Everything that one backward leaves behind."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    random_state: torch.Tensor
    more: list[torch.Tensor] = field(default_factory=list)

    def differences(self, other: Outcome) -> list[str]:
        """Name what is not bitwise the same."""
        found = [] if torch.equal(self.loss, other.loss) else ["loss"]
        for mine, theirs in ((self.gradients, other.gradients), (self.buffers, other.buffers)):
            assert mine.keys() == theirs.keys()
            found += [name for name in mine if not _same(mine[name], theirs[name])]
        if not torch.equal(self.random_state, other.random_state):
            found.append("random state")
        found += [f"more {n}" for n, (a, b) in enumerate(zip(self.more, other.more)) if not _same(a, b)]
        return found


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


def outcome(model: nn.Module, loss_of: Callable[[], torch.Tensor], steps: int = 1) -> Outcome:
    """Run forward and backward with a fixed seed; gradients of several steps add up."""
    with seeded():
        model.zero_grad()
        for _ in range(steps):
            loss = loss_of()
            loss.backward()
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        return Outcome(loss.detach().clone(), gradients, buffers, torch.get_rng_state())


def assert_same_with(subject: Subject, plan: Plan, steps: int = 1) -> None:
    """The model computes bitwise the same with the plan as without, and leaves the same behind."""
    outcomes = []
    for context in (contextlib.nullcontext, applied):
        model, inputs = subject.new()
        with contextlib.nullcontext() if context is contextlib.nullcontext else applied(model, plan):
            outcomes.append(outcome(model, lambda: subject.run(model, inputs), steps))  # noqa: B023
    assert outcomes[0].differences(outcomes[1]) == []


def tokens() -> torch.Tensor:
    return torch.randint(0, 20, (2, 6))


TRANSFORMER = Subject(Transformer, tokens, ("Transformer.blocks.0", "Transformer.blocks.1"))
IN_PLACE = Subject(InPlaceMLP, lambda: torch.randn(5, 12), ("InPlaceMLP.parts.0", "InPlaceMLP.parts.1"))
CONVOLUTIONS = Subject(ConvNet, lambda: torch.randn(2, 3, 8, 8), ("ConvNet.parts.0", "ConvNet.parts.1"))
SUBJECTS = {"transformer": TRANSFORMER, "in place": IN_PLACE, "convolutions": CONVOLUTIONS}
