"""Activations are kept in host memory between forward and backward (save_on_cpu)."""

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(256, 64, device=device)

    def run() -> torch.Tensor:
        with save_on_cpu(pin_memory=device == "cuda"):
            loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
