"""Gradient accumulation by a counter: the optimizer runs in every fourth call."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


def build(batch: int = 8, device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    every, calls = 4, 0

    def run() -> torch.Tensor:
        nonlocal calls
        inputs, labels = torch.randn(batch, 64, device=device), torch.randint(0, 10, (batch,), device=device)
        loss = F.cross_entropy(model(inputs), labels) / every
        loss.backward()
        calls += 1
        if calls % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return trainfit.Step(model, optimizer, run)
