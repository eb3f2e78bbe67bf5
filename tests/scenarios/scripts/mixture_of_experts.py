"""A mixture of experts: top-2 routing, a loop over experts with index_add, a load-balancing loss."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class MoE(nn.Module):
    def __init__(self, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
                for _ in range(experts)
            ]
        )
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        probabilities = self.router(flat).softmax(dim=-1)
        weights, chosen = probabilities.topk(2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == number)
            if row.numel() == 0:
                continue
            output.index_add_(0, row, expert(flat[row]) * weights[row, slot, None])
        share = F.one_hot(chosen, len(self.experts)).float().mean(dim=(0, 1))
        self.balance = (share * probabilities.mean(0)).sum() * len(self.experts)
        return output.view_as(x)


def build(batch: int = 4, seq: int = 24, device: str = "cpu") -> trainfit.Step:
    embed, moe, head = nn.Embedding(100, 32), MoE(), nn.Linear(32, 100)
    model = nn.Sequential(embed, moe, head).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 100, (batch, seq), device=device)

    def run() -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) + 0.01 * moe.balance
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
