"""A step that leaks: the history of losses keeps tensors, and with them whole graphs, not numbers."""

import torch
from torch import nn

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(32, 64, device=device)
    outputs: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        output = model(inputs)
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(output)
        return loss

    return trainfit.Step(model, optimizer, run)
