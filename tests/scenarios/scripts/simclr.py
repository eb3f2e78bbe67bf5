"""SimCLR: two views of each image, the NT-Xent loss with a boolean mask on the diagonal."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


def nt_xent(features: torch.Tensor, temperature: float = 0.5) -> torch.Tensor:
    half = len(features) // 2
    labels = torch.cat([torch.arange(half) for _ in range(2)])
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float().to(features.device)
    features = F.normalize(features, dim=1)
    similarity = features @ features.T
    mask = torch.eye(len(labels), dtype=torch.bool, device=features.device)
    labels = labels[~mask].view(len(labels), -1)
    similarity = similarity[~mask].view(len(similarity), -1)
    positives = similarity[labels.bool()].view(len(labels), -1)
    negatives = similarity[~labels.bool()].view(len(similarity), -1)
    logits = torch.cat([positives, negatives], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=features.device))


def build(device: str = "cpu") -> trainfit.Step:
    encoder = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    model = nn.Sequential(encoder, head).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    images = torch.rand(16, 3, 20, 20, device=device)

    def run() -> torch.Tensor:
        flipped = torch.flip(images, dims=[3])
        noisy = (images + 0.2 * torch.randn_like(images)).clamp(0, 1)
        loss = nt_xent(model(torch.cat([flipped, noisy])))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss

    return trainfit.Step(model, optimizer, run)
