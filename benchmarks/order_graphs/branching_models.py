"""Small models with branches that run beside each other: where the order of a compiled graph matters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from trainfit import Step


class Towers(nn.Module):
    """Independent towers over one input, each wide inside and narrow at its end, as in recommenders."""

    def __init__(self, towers: int = 6, width: int = 512, inner: int = 2048) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, 32)) for _ in range(towers)
        )
        self.head = nn.Linear(32 * towers, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = [tower(x) for tower in self.towers]
        return self.head(torch.cat(hidden, dim=-1)).square().mean()


class ManyHeads(nn.Module):
    """One trunk and several heads with a loss each, as multi-task models have them."""

    def __init__(self, heads: int = 6, width: int = 384, classes: int = 2000) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.heads = nn.ModuleList(nn.Linear(width, classes) for _ in range(heads))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x)
        losses = [head(hidden).logsumexp(-1).mean() for head in self.heads]
        return torch.stack(losses).sum()


class Inception(nn.Module):
    """Blocks of parallel convolutions of several sizes whose results are joined."""

    def __init__(self, blocks: int = 2, channels: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_InceptionBlock(channels) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class _InceptionBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        quarter = channels // 4
        self.branches = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, 2 * channels, 1),
                nn.ReLU(),
                nn.Conv2d(2 * channels, quarter, size, padding=size // 2),
            )
            for size in (1, 3, 5, 7)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1).relu()


class GatedMixture(nn.Module):
    """A dense mixture: every expert sees every token, a gate weighs their answers."""

    def __init__(self, experts: int = 5, width: int = 256) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        answers = [expert(x) * weights[..., n, None] for n, expert in enumerate(self.experts)]
        return torch.stack(answers).sum(0).square().mean()


def _step(model: nn.Module, *shape: int) -> Step:
    return Step.of(model.train(), (torch.randn(*shape),), loss=lambda value: value)


BRANCHING: dict[str, Callable[[], Step]] = {
    "towers": lambda: _step(Towers(), 1024, 512),
    "many heads": lambda: _step(ManyHeads(), 1024, 384),
    "inception": lambda: _step(Inception(), 4, 32, 48, 48),
    "gated mixture": lambda: _step(GatedMixture(), 2048, 256),
}
