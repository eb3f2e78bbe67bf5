"""An Adam of one's own that keeps its moments in eight bits with a scale per block."""

import torch
from torch import nn

import trainfit

BLOCK = 64


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = nn.functional.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
    return (blocks / scale).round().to(torch.int8), scale


def dequantise(codes: torch.Tensor, scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return (codes.float() * scale).flatten()[: like.numel()].view_as(like)


class Adam8bit(torch.optim.Optimizer):
    def __init__(self, params, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["first"], state["second"] = (
                        quantise(torch.zeros_like(p)),
                        quantise(torch.zeros_like(p)),
                    )
                state["step"] += 1
                first = dequantise(*state["first"], p).lerp_(p.grad, 0.1)
                second = dequantise(*state["second"], p).mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                p.addcdiv_(first, second.sqrt().add_(1e-8), value=-group["lr"] / (1 - 0.9 ** state["step"]))
                state["first"], state["second"] = quantise(first), quantise(second)


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(nn.Linear(100, 200), nn.SiLU(), nn.Linear(200, 10)).to(device)
    optimizer = Adam8bit(model.parameters())
    inputs, labels = torch.randn(20, 100, device=device), torch.randint(0, 10, (20,), device=device)

    def run() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model, optimizer, run)
