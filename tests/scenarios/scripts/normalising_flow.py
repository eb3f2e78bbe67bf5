"""RealNVP: affine coupling layers, log-likelihood under a normal with torch.distributions."""

import torch
from torch import nn
from torch.distributions import Independent, Normal

import trainfit


class Coupling(nn.Module):
    def __init__(self, size: int, mask: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.scale = nn.Sequential(nn.Linear(size, 64), nn.LeakyReLU(), nn.Linear(64, size), nn.Tanh())
        self.shift = nn.Sequential(nn.Linear(size, 64), nn.LeakyReLU(), nn.Linear(64, size))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = x * self.mask
        scale, shift = self.scale(kept) * (1 - self.mask), self.shift(kept) * (1 - self.mask)
        return kept + (1 - self.mask) * (x * torch.exp(scale) + shift), scale.sum(1)


class RealNVP(nn.Module):
    def __init__(self, size: int = 6, layers: int = 4) -> None:
        super().__init__()
        mask = torch.arange(size) % 2
        self.layers = nn.ModuleList(
            [Coupling(size, (mask if i % 2 else 1 - mask).float()) for i in range(layers)]
        )
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    def log_prob(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(x.shape[0])
        for layer in self.layers:
            x, log_det = layer(x)
            total = total + log_det
        return Independent(Normal(self.mean, self.std), 1).log_prob(x) + total


def build(device: str = "cpu") -> trainfit.Step:
    model = RealNVP().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    data = torch.randn(128, 6, device=device)

    def run() -> torch.Tensor:
        loss = -model.log_prob(data).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
