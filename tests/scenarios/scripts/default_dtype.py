"""Physics in double precision: the default dtype is float64 for the whole script."""

import torch
from torch import nn

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    points = torch.rand(100, 2, device=device, requires_grad=True)
    torch.set_default_dtype(before)

    def run() -> torch.Tensor:
        u = model(points)
        first = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)[0][:, 0]
        loss = (first[:, 1] - 0.1 * second).square().mean()
        optimizer.zero_grad()
        loss.backward()
        points.grad = None
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
