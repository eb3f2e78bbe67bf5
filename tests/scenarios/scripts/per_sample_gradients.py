"""DP-SGD: per-sample gradients with vmap over grad, clipped one by one, noise added."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 5)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = torch.randn(24, 32, device=device), torch.randint(0, 5, (24,), device=device)

    def loss_of_one(parameters: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        output = functional_call(model, parameters, (x.unsqueeze(0),))
        return F.cross_entropy(output, y.unsqueeze(0))

    per_sample = vmap(grad(loss_of_one), in_dims=(None, 0, 0))

    def run() -> torch.Tensor:
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        gradients = per_sample(parameters, inputs, labels)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, parameter in model.named_parameters():
            clipped = torch.einsum("n,n...->...", factor, gradients[name])
            parameter.grad = (clipped + 0.1 * torch.randn_like(clipped)) / len(inputs)
        optimizer.step()
        optimizer.zero_grad()
        return norms.mean()

    return trainfit.Step(model, optimizer, run)
