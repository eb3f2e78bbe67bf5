"""Video: factorised 3D convolutions, and depthwise ones as in mobile nets."""

import torch
from torch import nn

import trainfit


class Factorised(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.space = nn.Conv3d(inside, outside, (1, 3, 3), padding=(0, 1, 1))
        self.time = nn.Conv3d(outside, outside, (3, 1, 1), padding=(1, 0, 0), groups=outside)
        self.point = nn.Conv3d(outside, outside, 1)
        self.norm = nn.BatchNorm3d(outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.point(self.time(self.space(x)))))


def build(batch: int = 2, device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(
        Factorised(3, 8),
        nn.MaxPool3d(2),
        Factorised(8, 16),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(16, 6),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    clips, labels = (
        torch.randn(batch, 3, 4, 16, 16, device=device),
        torch.randint(0, 6, (batch,), device=device),
    )

    def run() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(clips), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
