"""Debugging a NaN: anomaly detection, deterministic algorithms, seeds everywhere."""

import random

import numpy as np
import torch
from torch import nn

import trainfit


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    torch.backends.cudnn.benchmark = False


def build(device: str = "cpu") -> trainfit.Step:
    seed_everything(17)
    model = nn.Sequential(nn.Linear(24, 48), nn.Softplus(), nn.Dropout(0.3), nn.Linear(48, 24)).to(device)
    optimizer = torch.optim.NAdam(model.parameters())
    inputs = torch.rand(20, 24, device=device)

    def run() -> torch.Tensor:
        torch.use_deterministic_algorithms(True)
        try:
            with torch.autograd.detect_anomaly(check_nan=True):
                loss = torch.log(model(inputs).exp() + 1).mean()
                optimizer.zero_grad()
                loss.backward()
        finally:
            torch.use_deterministic_algorithms(False)
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
