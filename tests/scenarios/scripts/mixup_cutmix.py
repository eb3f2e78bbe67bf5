"""Mixup or CutMix with NumPy's random numbers."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import trainfit


def cutmix(images: torch.Tensor, order: torch.Tensor, share: float) -> tuple[torch.Tensor, float]:
    height, width = images.shape[2:]
    cut_h, cut_w = int(height * np.sqrt(1 - share)), int(width * np.sqrt(1 - share))
    y, x = np.random.randint(height), np.random.randint(width)
    y1, y2 = np.clip([y - cut_h // 2, y + cut_h // 2], 0, height)
    x1, x2 = np.clip([x - cut_w // 2, x + cut_w // 2], 0, width)
    mixed = images.clone()
    mixed[:, :, y1:y2, x1:x2] = images[order, :, y1:y2, x1:x2]
    return mixed, 1 - (y2 - y1) * (x2 - x1) / (height * width)


def build(device: str = "cpu") -> trainfit.Step:
    np.random.seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.rand(16, 3, 16, 16, device=device), torch.randint(0, 10, (16,), device=device)

    def run() -> torch.Tensor:
        share = float(np.random.beta(1.0, 1.0))
        order = torch.randperm(len(images), device=device)
        if np.random.rand() < 0.5:
            mixed, share = cutmix(images, order, share)
        else:
            mixed = share * images + (1 - share) * images[order]
        output = model(mixed)
        loss = share * F.cross_entropy(output, labels) + (1 - share) * F.cross_entropy(output, labels[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
