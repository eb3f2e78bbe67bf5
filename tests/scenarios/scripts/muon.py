"""A Muon-like optimizer of one's own: momentum made orthogonal by Newton-Schulz iterations."""

import torch
from torch import nn

import trainfit


def orthogonal(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    x = x / (x.norm() + 1e-7)
    if g.size(0) > g.size(1):
        x = x.T
    for _ in range(steps):
        xx = x @ x.T
        x = a * x + (b * xx + c * xx @ xx) @ x
    return (x.T if g.size(0) > g.size(1) else x).to(g.dtype)


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                buffer = state["momentum_buffer"]
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(buffer, group["momentum"]))
                p.add_(update, alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(
        nn.Embedding(150, 48), nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48), nn.Linear(48, 150)
    )
    model.to(device)
    hidden = [p for layer in model[1:4] for p in layer.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not h for h in hidden)]
    optimizers = [Muon(hidden), torch.optim.AdamW(others, lr=3e-4)]
    tokens = torch.randint(0, 150, (4, 24), device=device)

    def run() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        return loss

    return trainfit.Step(model, optimizers, run)
