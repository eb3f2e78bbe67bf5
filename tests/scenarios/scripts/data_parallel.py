"""nn.DataParallel around a model, as older scripts have it, on whatever GPUs there are."""

import torch
from torch import nn

import trainfit


def build(batch: int = 16, device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    model = nn.DataParallel(model).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    inputs, labels = torch.randn(batch, 32).to(device), torch.randint(0, 4, (batch,)).to(device)

    def run() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
