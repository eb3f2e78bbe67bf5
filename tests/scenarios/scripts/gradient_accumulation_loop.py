"""Gradient accumulation: four small batches in a loop, then one optimizer step, with bf16 autocast."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


def build(batch: int = 8, device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.LayerNorm(64), nn.Linear(64, 10)
    )
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    accumulate = 4

    def run() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for _ in range(accumulate):
            inputs = torch.randn(batch, 64, device=device)
            labels = torch.randint(0, 10, (batch,), device=device)
            with torch.autocast(device_type=device, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(inputs), labels) / accumulate
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return trainfit.Step(model, optimizer, run)
