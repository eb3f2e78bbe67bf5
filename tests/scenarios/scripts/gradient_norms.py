"""Logs the norm of every parameter's gradient and the share of dead units, as one does with a sick model."""

from collections import defaultdict

import torch
from torch import nn

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(40, 80), nn.ReLU(), nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 4)).to(
        device
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    history: dict[str, list[float]] = defaultdict(list)
    dead: dict[str, float] = {}

    def watch(name: str):
        def hook(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
            dead[name] = (output <= 0).float().mean().item()

        return hook

    for name, module in model.named_modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(watch(name))
    inputs, labels = torch.randn(24, 40, device=device), torch.randint(0, 4, (24,), device=device)

    def run() -> dict[str, float]:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            history[name].append(parameter.grad.norm().item())
            history[f"{name}/update"].append((parameter.grad.std() / (parameter.std() + 1e-9)).item())
        optimizer.step()
        return {"loss": loss.item(), **dead}

    return trainfit.Step(model, optimizer, run)
