"""WGAN-GP: a critic with a gradient penalty, which needs the gradient of a gradient."""

import torch
from torch import nn

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    critic = nn.Sequential(
        nn.Linear(64, 96), nn.LeakyReLU(0.2), nn.Linear(96, 96), nn.LeakyReLU(0.2), nn.Linear(96, 1)
    )
    generator = nn.Sequential(nn.Linear(16, 96), nn.ReLU(), nn.Linear(96, 64))
    critic.to(device), generator.to(device)
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=5e-5)
    real = torch.randn(32, 64, device=device)

    def gradient_penalty(fake: torch.Tensor) -> torch.Tensor:
        alpha = torch.rand(real.size(0), 1, device=device)
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        score = critic(mixed)
        (gradients,) = torch.autograd.grad(score, mixed, torch.ones_like(score), create_graph=True)
        return ((gradients.norm(2, dim=1) - 1) ** 2).mean()

    def run() -> float:
        with torch.no_grad():
            fake = generator(torch.randn(32, 16, device=device))
        loss = critic(fake).mean() - critic(real).mean() + 10 * gradient_penalty(fake)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return trainfit.Step(critic, optimizer, run)
