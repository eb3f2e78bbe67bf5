"""Bayesian personalised ranking; the model is imported from the file beside this one."""

import torch
import torch.nn.functional as F
from ranking_model import Ranker

import trainfit


def build(batch: int = 64, device: str = "cpu") -> trainfit.Step:
    model = Ranker().to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

    def run() -> torch.Tensor:
        users = torch.randint(0, 200, (batch,), device=device)
        liked, other = torch.randint(0, 300, (2, batch), device=device)
        loss = -F.logsigmoid(model(users, liked) - model(users, other)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, optimizer, run)
