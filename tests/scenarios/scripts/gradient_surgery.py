"""PCGrad: two tasks on one trunk, gradients by autograd.grad with retain_graph, conflicts projected away."""

import torch
import torch.nn.functional as F
from torch import nn

import trainfit


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(64, 5), nn.Linear(64, 1)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.trunk(x)
        return [head(hidden) for head in self.heads]


def build(device: str = "cpu") -> trainfit.Step:
    model = TwoHeads().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(40, 32, device=device)
    classes, values = torch.randint(0, 5, (40,), device=device), torch.randn(40, 1, device=device)
    shared = list(model.trunk.parameters())

    def run() -> list[float]:
        optimizer.zero_grad()
        first, second = model(inputs)
        losses = [F.cross_entropy(first, classes), F.mse_loss(second, values)]
        flat = []
        for loss in losses:
            gradients = torch.autograd.grad(loss, shared, retain_graph=True)
            flat.append(torch.cat([g.reshape(-1) for g in gradients]))
        dot = torch.dot(*flat)
        if dot < 0:
            flat = [
                flat[0] - dot / flat[1].norm() ** 2 * flat[1],
                flat[1] - dot / flat[0].norm() ** 2 * flat[0],
            ]
        merged = sum(flat)
        sum(losses).backward()
        offset = 0
        for parameter in shared:
            parameter.grad = merged[offset : offset + parameter.numel()].view_as(parameter).clone()
            offset += parameter.numel()
        optimizer.step()
        return [loss.item() for loss in losses]

    return trainfit.Step(model, optimizer, run)
