"""A mistake that happens: the step forgets loss.backward()."""

import torch
from torch import nn

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Linear(16, 4).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(8, 16, device=device)

    def run() -> torch.Tensor:
        loss = model(inputs).square().mean()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
