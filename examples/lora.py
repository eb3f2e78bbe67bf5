"""LoRA written by hand: the weights are frozen, two thin matrices per layer are trained.

Compare the two; frozen weights need neither gradients nor optimizer state, but activations remain:

    trainfit estimate examples/lora.py:full --device rtx-4090
    trainfit estimate examples/lora.py:build --device rtx-4090
"""

from __future__ import annotations

import torch
from torch import nn

import trainfit

WIDTH = 512
LAYERS = 6


class LoraLinear(nn.Module):
    """A frozen linear layer plus a trainable product of two thin matrices."""

    def __init__(self, linear: nn.Linear, rank: int = 8) -> None:
        """Freeze `linear` and add the two matrices; the second starts at zero and so changes nothing yet."""
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the frozen result plus the trained correction."""
        result: torch.Tensor = self.linear(x) + self.up(self.down(x))
        return result


def make_model() -> nn.Sequential:
    """Make a plain stack of wide layers."""
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def full(batch: int = 64, device: str = "cpu") -> trainfit.Step:
    """Train every weight."""
    return make_step(make_model(), batch, device)


def build(batch: int = 64, device: str = "cpu") -> trainfit.Step:
    """Train the thin matrices only."""
    model = make_model().requires_grad_(False)
    for number, layer in enumerate(model):
        if isinstance(layer, nn.Linear):
            model[number] = LoraLinear(layer)
    return make_step(model, batch, device)


def make_step(model: nn.Module, batch: int, device: str) -> trainfit.Step:
    """Wrap the model in the usual step; the optimizer sees only what is trained."""
    model = model.to(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return trainfit.Step.of(
        model,
        torch.randn(batch, WIDTH, device=device),
        loss=lambda output: output.square().mean(),
        optimizer=torch.optim.AdamW(trained),
    )


if __name__ == "__main__":
    print(f"loss of one real step: {build(batch=2).run().item():.3f}")
