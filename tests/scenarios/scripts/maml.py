"""MAML of second order: adapt with create_graph on the support set, learn from the query set."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)).to(
        device
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inner_lr, inner_steps, tasks = 0.01, 2, 3

    def sample() -> tuple[torch.Tensor, torch.Tensor]:
        phase = torch.rand(1, device=device) * 3.14
        x = torch.rand(20, 1, device=device) * 10 - 5
        return x, torch.sin(x + phase)

    def run() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for _ in range(tasks):
            x, y = sample()
            adapted = dict(model.named_parameters())
            for _ in range(inner_steps):
                loss = F.mse_loss(functional_call(model, adapted, (x[:10],)), y[:10])
                gradients = torch.autograd.grad(loss, tuple(adapted.values()), create_graph=True)
                adapted = {name: p - inner_lr * g for (name, p), g in zip(adapted.items(), gradients)}
            total = total + F.mse_loss(functional_call(model, adapted, (x[10:],)), y[10:])
        total.backward()
        optimizer.step()
        return total.detach() / tasks

    return trainfit.Step(model, optimizer, run)
