"""Transfer learning: a frozen backbone in eval mode, a new head, stochastic depth in between."""

import random

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class Residual(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.rand(1).item() < self.drop:
            return x
        keep = torch.rand(x.size(0), 1, device=x.device) < 0.9
        return x + self.branch(x) * keep


def build(batch: int = 16, device: str = "cpu") -> trainfit.Step:
    random.seed(1)
    backbone = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    head = nn.Sequential(*[Residual(16, 0.2) for _ in range(4)], nn.Linear(16, 5))
    model = nn.Sequential(backbone, head).to(device)
    for parameter in backbone.parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()))
    images, labels = (
        torch.randn(batch, 3, 20, 20, device=device),
        torch.randint(0, 5, (batch,), device=device),
    )

    def run() -> torch.Tensor:
        model.train()
        backbone.eval()
        flipped = images.flip(3) if random.random() < 0.5 else images
        loss = F.cross_entropy(model(flipped), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
