"""A custom operator that only has a kernel: nobody said what it returns without running it."""

import torch
from torch import nn

import trainfit


@torch.library.custom_op("scenarios::top_rows", mutates_args=())
def top_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    return x[x.sum(1).topk(count).indices].clone()


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Linear(16, 16).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(64, 16, device=device)

    def run() -> torch.Tensor:
        loss = model(top_rows(inputs, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
