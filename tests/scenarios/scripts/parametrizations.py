"""weight_norm, spectral_norm and a symmetric parametrization of one's own."""

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import trainfit


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def build(device: str = "cpu") -> trainfit.Step:
    normed = parametrizations.weight_norm(nn.Linear(48, 48))
    spectral = parametrizations.spectral_norm(nn.Linear(48, 48))
    symmetric = nn.Linear(48, 48)
    parametrize.register_parametrization(symmetric, "weight", Symmetric())
    orthogonal = parametrizations.orthogonal(nn.Linear(48, 48))
    model = nn.Sequential(normed, nn.ELU(), spectral, nn.ELU(), symmetric, nn.ELU(), orthogonal).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs = torch.randn(32, 48, device=device)

    def run() -> torch.Tensor:
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
