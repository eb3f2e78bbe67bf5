"""The optimizer steps inside of backward, parameter by parameter, so that gradients are never all there."""

import torch
from torch import nn

import trainfit


def build(device: str = "cpu") -> trainfit.Step:
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(96, 96), nn.ReLU())]).to(device)
    optimizers = {p: torch.optim.Adam([p], lr=1e-3) for p in model.parameters()}

    def step_now(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    inputs = torch.randn(32, 96, device=device)

    def run() -> torch.Tensor:
        loss = model(inputs).pow(2).mean()
        loss.backward()
        return loss

    return trainfit.Step(model, list(optimizers.values()), run)
