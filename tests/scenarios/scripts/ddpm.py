"""A DDPM step: noise at a random time, a small UNet with time embeddings, an EMA copy by deepcopy."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.Conv2d(outside, outside, 3, padding=1),
        )
        self.norm1, self.norm2 = nn.GroupNorm(4, outside), nn.GroupNorm(4, outside)
        self.time = nn.Linear(time, outside)
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.norm1(self.conv1(x))) + self.time(F.silu(t))[:, :, None, None]
        return F.silu(self.norm2(self.conv2(h))) + self.skip(x)


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.down1, self.down2 = Block(3, width, 32), Block(width, 2 * width, 32)
        self.middle = Block(2 * width, 2 * width, 32)
        self.up2, self.up1 = Block(4 * width, width, 32), Block(2 * width, width, 32)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(-math.log(10000) * torch.arange(16, device=x.device) / 16)
        angles = t[:, None].float() * frequencies[None]
        time = torch.cat([angles.sin(), angles.cos()], dim=-1)
        h1 = self.down1(x, time)
        h2 = self.down2(F.avg_pool2d(h1, 2), time)
        h = self.middle(F.avg_pool2d(h2, 2), time)
        h = self.up2(torch.cat([F.interpolate(h, scale_factor=2, mode="nearest"), h2], dim=1), time)
        h = self.up1(torch.cat([F.interpolate(h, scale_factor=2, mode="nearest"), h1], dim=1), time)
        return self.out(h)


def build(batch: int = 4, device: str = "cpu") -> trainfit.Step:
    model = UNet().to(device)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=device), dim=0)
    images = torch.rand(batch, 3, 16, 16, device=device) * 2 - 1

    def run() -> torch.Tensor:
        t = torch.randint(0, 1000, (batch,), device=device)
        noise = torch.randn_like(images)
        a = alphas[t][:, None, None, None]
        loss = F.mse_loss(model(a.sqrt() * images + (1 - a).sqrt() * noise, t), noise)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), model.parameters()):
                slow.mul_(0.999).add_(fast, alpha=0.001)
        return loss

    return trainfit.Step(model, optimizer, run)
