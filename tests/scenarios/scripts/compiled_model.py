"""The model goes through torch.compile, as most tutorials now do."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(self.first(x)))


def build(device: str = "cpu") -> trainfit.Step:
    model = torch.compile(Net().to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, labels = torch.randn(16, 32, device=device), torch.randint(0, 10, (16,), device=device)

    def run() -> torch.Tensor:
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
