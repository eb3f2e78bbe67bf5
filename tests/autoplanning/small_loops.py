"""Small training loops whose state can be compared bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Loop = tuple[nn.Module, torch.optim.Optimizer, Callable[[torch.Tensor], float]]
ROWS, WIDTH = 128, 48


class Part(nn.Module):
    """Enough activations to be worth a plan, random draws, and a buffer that every step writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        wide = nn.functional.dropout(nn.functional.gelu(self.wide(x)), 0.1, self.training)
        return x + self.norm(self.narrow(wide))


class Tied(nn.Module):
    """Parts, and a first and last layer that share one weight."""

    def __init__(self, parts: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.parts = nn.ModuleList(Part() for _ in range(parts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        return self.last(x)


def make_loop() -> Loop:
    """Return a model, its optimizer, and a step with clipping, a schedule and something that counts."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses: list[float] = []

    def step(batch: torch.Tensor) -> float:
        loss = (model(batch) - batch.roll(1, 0)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        return losses[-1]

    step.losses, step.schedule = losses, schedule  # type: ignore[attr-defined]
    return model, optimizer, step


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(count)]


def all_state(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Return copies of everything that training changes, and where it lies."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "values": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "addresses": {name: tensor.data_ptr() for name, tensor in tensors.items()},
        "writes": {name: tensor._version for name, tensor in tensors.items()},
        "objects": {name: id(tensor) for name, tensor in tensors.items()},
        "gradients": {
            name: None if p.grad is None else (id(p.grad), p.grad.clone())
            for name, p in model.named_parameters()
        },
        "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers],
        "random": torch.get_rng_state(),
        "training": [module.training for module in model.modules()],
    }


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, bit by bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
