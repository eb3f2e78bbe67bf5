"""LBFGS with a closure and a strong Wolfe line search, as in style transfer and physics-informed networks."""

import torch
from torch import nn

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).to(
        device
    )
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=5, history_size=4, line_search_fn="strong_wolfe"
    )
    x = torch.linspace(-1, 1, 64, device=device).unsqueeze(1).requires_grad_(True)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        u = model(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        loss = ((du + u) ** 2).mean() + (model(torch.zeros(1, 1, device=device)) - 1).pow(2).sum()
        loss.backward()
        return loss

    def run() -> torch.Tensor:
        return optimizer.step(closure)

    return trainfit.Step(model, optimizer, run)
