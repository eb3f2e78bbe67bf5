"""NeRF-like: random rays, positional encoding, volume rendering with cumprod."""

import torch
from torch import nn

import trainfit


def encode(x: torch.Tensor, levels: int) -> torch.Tensor:
    parts = [x]
    for level in range(levels):
        for function in (torch.sin, torch.cos):
            parts.append(function(2.0**level * x))
    return torch.cat(parts, -1)


class Radiance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(27, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.density = nn.Linear(64, 1)
        self.colour = nn.Sequential(nn.Linear(64 + 15, 32), nn.ReLU(), nn.Linear(32, 3), nn.Sigmoid())

    def forward(self, points: torch.Tensor, directions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(encode(points, 4))
        return self.colour(torch.cat([hidden, encode(directions, 2)], -1)), self.density(hidden).squeeze(-1)


def build(device: str = "cpu") -> trainfit.Step:
    model = Radiance().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    pixels = torch.rand(400, 3, device=device)
    rays = torch.randn(400, 6, device=device)

    def run() -> float:
        chosen = torch.randperm(400, device=device)[:64]
        origins, directions = rays[chosen].split(3, dim=-1)
        directions = directions / directions.norm(dim=-1, keepdim=True)
        depth = torch.linspace(2.0, 6.0, 16, device=device).expand(64, 16)
        depth = depth + torch.rand_like(depth) * 0.25
        points = origins[:, None] + depth[..., None] * directions[:, None]
        colour, density = model(points, directions[:, None].expand_as(points))
        gaps = torch.cat([depth[:, 1:] - depth[:, :-1], torch.full((64, 1), 1e10, device=device)], -1)
        alpha = 1 - torch.exp(-torch.relu(density) * gaps)
        light = torch.cumprod(torch.cat([torch.ones(64, 1, device=device), 1 - alpha + 1e-10], -1), -1)[
            :, :-1
        ]
        rendered = ((alpha * light)[..., None] * colour).sum(-2)
        loss = ((rendered - pixels[chosen]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.999
        return loss.item()

    return trainfit.Step(model, optimizer, run)
