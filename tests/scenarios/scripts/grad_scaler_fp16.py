"""fp16 on a GPU with a GradScaler, unscaled before clipping; the scaler is off on a CPU."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


def build(batch: int = 16, device: str = "cpu") -> trainfit.Step:
    use_amp = device == "cuda"
    model = nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)
    )
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device, enabled=use_amp)
    inputs, labels = torch.randn(batch, 64, device=device), torch.randint(0, 10, (batch,), device=device)

    def run() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device_type=device, dtype=torch.float16, enabled=use_amp):
            loss = F.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return trainfit.Step(model, optimizer, run)
