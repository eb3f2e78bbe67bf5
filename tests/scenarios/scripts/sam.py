"""Sharpness-aware minimisation: climb to the worst point nearby, take the gradient there, come back."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base: type[torch.optim.Optimizer], rho: float = 0.05, **settings) -> None:
        super().__init__(params, {"rho": rho, **settings})
        self.base = base(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        norms = [p.grad.norm(2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack(norms).norm(2)
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()

    def step(self, closure=None):
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Conv2d(3, 12, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 49, 10)).to(device)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    images, labels = torch.randn(8, 3, 16, 16, device=device), torch.randint(0, 10, (8,), device=device)

    def run() -> torch.Tensor:
        def closure() -> torch.Tensor:
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(closure)
        return loss

    return trainfit.Step(model, optimizer, run)
