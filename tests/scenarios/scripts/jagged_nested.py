"""Sequences of different lengths as a jagged nested tensor, without padding."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class JaggedEncoder(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(x).unflatten(-1, [4, 8]).transpose(1, 2) for project in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).flatten(-2))


def build(device: str = "cpu") -> trainfit.Step:
    model = JaggedEncoder().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sequences = [torch.randn(length, 32, device=device) for length in (5, 12, 9, 3)]

    def run() -> torch.Tensor:
        batch = torch.nested.nested_tensor(sequences, layout=torch.jagged, device=device)
        loss = model(batch).values().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
