"""Model parallel: the first half on one GPU, the second on another."""

import torch
from torch import nn

import trainfit


class Halves(nn.Module):
    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128).to(first), nn.Linear(128, 10).to(second)
        self.devices = (first, second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x.to(self.devices[0])))
        return self.second(hidden.to(self.devices[1]))


def build(device: str = "cpu") -> trainfit.Step:
    model = Halves("cuda:0", "cuda:1") if device == "cuda" else Halves("cpu", "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(16, 64)

    def run() -> torch.Tensor:
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
