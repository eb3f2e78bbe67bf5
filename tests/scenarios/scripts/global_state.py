"""A notebook turned into a script: everything is global, build() only says where it is."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit

model: nn.Module
optimizer: torch.optim.Optimizer
cache: dict[int, torch.Tensor] = {}
losses: list[float] = []


def features(number: int) -> torch.Tensor:
    """Slow to compute, so the result is kept."""
    if number not in cache:
        cache[number] = torch.randn(64, 32, generator=torch.Generator().manual_seed(number))
    return cache[number]


def train_step() -> float:
    device = next(model.parameters()).device
    inputs = features(len(losses) % 1).to(device)
    loss = F.mse_loss(model(inputs), inputs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(float(loss))
    return losses[-1]


def build(device: str = "cpu") -> trainfit.Step:
    global model, optimizer
    cache.clear()
    losses.clear()
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 32)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return trainfit.Step(model, optimizer, train_step)
