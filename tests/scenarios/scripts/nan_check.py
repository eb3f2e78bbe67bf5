"""A loop that guards itself: skip the batch if the loss is not finite, stop early if it no longer falls."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(64, 32, device=device), torch.randn(64, 1, device=device)
    best, patience = math.inf, 0

    def run() -> float:
        nonlocal best, patience
        loss = F.mse_loss(model(inputs), targets)
        if not torch.isfinite(loss):
            print("loss is not finite, batch skipped")
            optimizer.zero_grad()
            return math.nan
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            if torch.isnan(parameter.grad).any():
                raise ValueError(f"NaN in the gradient of {name}")
        optimizer.step()
        value = loss.item()
        if value < best:
            best, patience = value, 0
        else:
            patience += 1
        return value

    return trainfit.Step(model, optimizer, run)
