"""Distillation: a small student learns from a larger frozen teacher."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def build(device: str = "cpu") -> trainfit.Step:
    teacher, student = mlp(512).to(device).eval(), mlp(64).to(device)
    teacher.requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters())
    inputs, labels = torch.randn(64, 64, device=device), torch.randint(0, 10, (64,), device=device)
    temperature = 2.0

    def run() -> torch.Tensor:
        with torch.inference_mode():
            soft = F.softmax(teacher(inputs) / temperature, dim=-1)
        logits = student(inputs)
        loss = F.cross_entropy(logits, labels) + temperature**2 * F.kl_div(
            F.log_softmax(logits / temperature, dim=-1), soft.clone(), reduction="batchmean"
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(student, optimizer, run)
