"""A UNet for segmentation: transposed convolutions, bilinear interpolation, cross-entropy and Dice."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


def double(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
        nn.Conv2d(outside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.first, self.second, self.bottom = double(3, 8), double(8, 16), double(16, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.join2, self.join1 = double(32, 16), double(24, 8)
        self.head = nn.Conv2d(8, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        b = self.second(F.max_pool2d(a, 2))
        c = self.join2(torch.cat([self.up(self.bottom(F.max_pool2d(b, 2))), b], dim=1))
        c = F.interpolate(c, size=a.shape[2:], mode="bilinear", align_corners=False)
        return self.head(self.join1(torch.cat([c, a], dim=1)))


def dice(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    probabilities = logits.softmax(1)
    truth = F.one_hot(masks, logits.size(1)).permute(0, 3, 1, 2).float()
    overlap = (probabilities * truth).sum(dim=(0, 2, 3))
    return 1 - (2 * overlap / (probabilities.sum(dim=(0, 2, 3)) + truth.sum(dim=(0, 2, 3)) + 1e-6)).mean()


def build(batch: int = 2, device: str = "cpu") -> trainfit.Step:
    model = UNet().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9)
    images = torch.randn(batch, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    masks = torch.randint(0, 4, (batch, 32, 32), device=device)

    def run() -> torch.Tensor:
        logits = model(images)
        loss = F.cross_entropy(logits, masks) + dice(logits, masks)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
