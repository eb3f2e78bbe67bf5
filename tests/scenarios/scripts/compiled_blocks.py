"""Only the blocks are compiled (regional compilation), and a loss function with the decorator."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


@torch.compile(dynamic=False)
def focal_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(24, 32), *[Block(32) for _ in range(2)], nn.Linear(32, 6)).to(device)
    for number in (1, 2):
        model[number] = torch.compile(model[number])
    model[0].compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(16, 24, device=device), torch.randint(0, 6, (16,), device=device)

    def run() -> torch.Tensor:
        loss = focal_loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
