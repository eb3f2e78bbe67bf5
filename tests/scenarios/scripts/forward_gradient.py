"""Forward-mode: a directional derivative by jvp for the loss, and backward for a regulariser."""

import torch
from torch import nn
from torch.func import functional_call, jvp

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(40, 16, device=device), torch.randn(40, 1, device=device)

    def run() -> torch.Tensor:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        direction = {name: torch.randn_like(p) for name, p in parameters.items()}

        def loss_of(values: dict) -> torch.Tensor:
            return (functional_call(model, values, (inputs,)) - targets).square().mean()

        loss, slope = jvp(loss_of, (parameters,), (direction,))
        penalty = sum(p.square().sum() for p in model.parameters()) * 1e-4
        penalty.backward()
        for name, parameter in model.named_parameters():
            parameter.grad += slope * direction[name]
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
