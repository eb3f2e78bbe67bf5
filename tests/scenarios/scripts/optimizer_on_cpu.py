"""Optimizer state on the host: a copy of the weights is trained there and copied back (ZeRO-Offload)."""

import torch
from torch import nn

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).to(device)
    masters = [p.detach().to("cpu", copy=True).requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    inputs, labels = torch.randn(32, 64, device=device), torch.randint(0, 8, (32,), device=device)

    def run() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        for parameter, master in zip(model.parameters(), masters):
            master.grad = parameter.grad.to("cpu", non_blocking=True)
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters):
                parameter.copy_(master)
        return loss

    return trainfit.Step(model, optimizer, run)
