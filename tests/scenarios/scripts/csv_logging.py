"""Logs loss, learning rate and throughput to a CSV file and to the screen in every step."""

import csv
import time

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class CsvWriter:
    def __init__(self, path: str) -> None:
        self.file = open(path, "w", newline="")
        self.writer = csv.writer(self.file)
        self.writer.writerow(["step", "loss", "lr", "norm", "seconds"])

    def add(self, *row: float) -> None:
        self.writer.writerow(row)
        self.file.flush()


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
    writer = CsvWriter("log.csv")
    step = 0

    def run() -> float:
        nonlocal step
        begin = time.time()
        inputs = torch.randn(32, 32, device=device)
        loss = F.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        value = loss.item()
        scheduler.step(value)
        step += 1
        writer.add(step, value, optimizer.param_groups[0]["lr"], norm.item(), time.time() - begin)
        print(f"step {step} loss {value:.4f} norm {norm:.3f}")
        return value

    return trainfit.Step(model, optimizer, run)
