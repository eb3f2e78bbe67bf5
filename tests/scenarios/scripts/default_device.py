"""Everything is made on one device without naming it: `with torch.device(...)` around the setup."""

import torch
from torch import nn

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(36, 72), nn.Mish(), nn.Linear(72, 9))
        inputs, labels = torch.randn(30, 36), torch.randint(0, 9, (30,))
    optimizer = torch.optim.Adamax(model.parameters())

    def run() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
