"""LoRA written by hand: linear layers of a frozen model get a low-rank branch."""

import math

import torch
from torch import nn

import trainfit


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4, alpha: int = 8) -> None:
        super().__init__()
        self.base = base
        self.base.weight.requires_grad_(False)
        if self.base.bias is not None:
            self.base.bias.requires_grad_(False)
        self.a = nn.Parameter(torch.empty(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.scale = alpha / rank
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (self.dropout(x) @ self.a.T @ self.b.T) * self.scale


def add_lora(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, LoRALinear(child))
        else:
            add_lora(child)


def build(batch: int = 4, device: str = "cpu") -> trainfit.Step:
    blocks = [
        nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)
    ]
    model = nn.Sequential(nn.Embedding(400, 64), *blocks, nn.LayerNorm(64))
    for parameter in model.parameters():
        parameter.requires_grad = False
    add_lora(model)
    model.to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    tokens = torch.randint(0, 400, (batch, 32), device=device)

    def run() -> torch.Tensor:
        hidden = model(tokens)
        loss = nn.functional.cross_entropy((hidden @ model[0].weight.T).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return trainfit.Step(model, optimizer, run)
