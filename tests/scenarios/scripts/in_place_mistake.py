"""A mistake that happens: an activation that backward needs is overwritten in place."""

import torch
from torch import nn

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    first, second = nn.Linear(16, 32), nn.Linear(32, 4)
    model = nn.Sequential(first, second).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(8, 16, device=device)

    def run() -> torch.Tensor:
        hidden = torch.sigmoid(first(inputs))
        hidden += 1
        loss = second(hidden).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
