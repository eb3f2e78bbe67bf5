"""Saves a checkpoint in every step and the best model beside it, with torch.save and safetensors."""

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, labels = torch.randn(16, 24, device=device), torch.randint(0, 3, (16,), device=device)
    best = float("inf")
    step = 0

    def run() -> float:
        nonlocal best, step
        step += 1
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.save(
            {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt"
        )
        if loss.item() < best:
            best = loss.item()
            save_file(model.state_dict(), "best.safetensors")
        return loss.item()

    return trainfit.Step(model, optimizer, run)
