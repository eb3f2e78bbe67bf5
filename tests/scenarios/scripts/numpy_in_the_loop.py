"""Hard-example mining: losses go to NumPy, the worst half of the batch is chosen there and trained on."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import trainfit


def build(batch: int = 32, device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(30, 60), nn.ReLU(), nn.Linear(60, 5)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    features = np.random.default_rng(0).standard_normal((256, 30)).astype(np.float32)
    labels = np.random.default_rng(1).integers(0, 5, 256)

    def run() -> float:
        rows = np.random.choice(256, batch, replace=False)
        x, y = torch.from_numpy(features[rows]).to(device), torch.from_numpy(labels[rows]).to(device)
        with torch.no_grad():
            losses = F.cross_entropy(model(x), y, reduction="none").cpu().numpy()
        worst = np.argsort(losses)[-batch // 2 :].copy()
        index = torch.as_tensor(worst, device=device)
        loss = F.cross_entropy(model(x[index]), y[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach().cpu().numpy())

    return trainfit.Step(model, optimizer, run)
