"""Adversarial training: PGD on the inputs inside of the step, then an ordinary update."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


def pgd(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, epsilon=8 / 255, alpha=2 / 255, steps=3
) -> torch.Tensor:
    adversarial = x.detach() + torch.empty_like(x).uniform_(-epsilon, epsilon)
    for _ in range(steps):
        adversarial.requires_grad_()
        with torch.enable_grad():
            loss = F.cross_entropy(model(adversarial), y)
        gradient = torch.autograd.grad(loss, [adversarial])[0]
        adversarial = adversarial.detach() + alpha * torch.sign(gradient.detach())
        adversarial = torch.min(torch.max(adversarial, x - epsilon), x + epsilon).clamp(0, 1)
    return adversarial


def build(batch: int = 8, device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    images, labels = (
        torch.rand(batch, 3, 16, 16, device=device),
        torch.randint(0, 10, (batch,), device=device),
    )

    def run() -> torch.Tensor:
        model.eval()
        attacked = pgd(model, images, labels)
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(attacked), labels)
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
