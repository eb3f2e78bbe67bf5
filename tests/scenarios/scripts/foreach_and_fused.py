"""Two parameter groups, two optimizers: a fused AdamW for the body and a foreach SGD for the head."""

import torch
from torch import nn

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
    head = nn.Linear(64, 8)
    model = nn.Sequential(body, head).to(device)
    optimizers = [
        torch.optim.AdamW(body.parameters(), lr=1e-3, fused=True),
        torch.optim.SGD(head.parameters(), lr=1e-2, momentum=0.9, foreach=True),
    ]
    inputs, labels = torch.randn(32, 64, device=device), torch.randint(0, 8, (32,), device=device)

    def run() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizers, run)
