"""Lookahead around another optimizer: slow weights follow the fast ones every fifth step."""

import torch
from torch import nn

import trainfit


class Lookahead:
    def __init__(self, optimizer: torch.optim.Optimizer, k: int = 5, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha, self.counter = optimizer, k, alpha, 0
        self.slow = [[p.clone().detach() for p in group["params"]] for group in optimizer.param_groups]

    def step(self) -> None:
        self.optimizer.step()
        self.counter += 1
        if self.counter % self.k:
            return
        for group, slow in zip(self.optimizer.param_groups, self.slow):
            for p, q in zip(group["params"], slow):
                q.data.add_(p.data - q.data, alpha=self.alpha)
                p.data.copy_(q.data)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(40, 80), nn.ReLU(), nn.Linear(80, 4)).to(device)
    base = torch.optim.RAdam(model.parameters(), lr=1e-3)
    optimizer = Lookahead(base)
    inputs, labels = torch.randn(50, 40, device=device), torch.randint(0, 4, (50,), device=device)

    def run() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return trainfit.Step(model, base, run)
