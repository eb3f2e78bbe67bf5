"""Part of a package: the model comes from a relative import, but the file is given by its path."""

import torch

import trainfit

from .ranking_model import Ranker


def build(device: str = "cpu") -> trainfit.Step:
    model = Ranker().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    users, items = torch.randint(0, 200, (2, 16), device=device)

    def run() -> torch.Tensor:
        loss = model(users, items).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
