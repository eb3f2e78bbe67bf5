"""Models that `compile_plans.py` compiles: a transformer, and two that torch's own budget fails on."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WORDS = 1000


class Block(nn.Module):
    """Attention and a feed-forward part; `gated` as Llama has it."""

    def __init__(self, width: int, heads: int, gated: bool) -> None:
        super().__init__()
        self.heads, self.gated = heads, gated
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.first, self.second = norm(width), norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up = nn.Linear(width, (8 if gated else 4) * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        if self.gated:
            gate, wide = self.up(self.second(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * wide)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Language(nn.Module):
    """Blocks between an embedding and a cross entropy."""

    def __init__(self, blocks: int, width: int, *, gated: bool = False, passes: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, 8, gated) for _ in range(blocks))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, WORDS)
        self.passes = passes

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        losses = []
        for number in range(self.passes):
            x = self.embedding(tokens if number == 0 else tokens.flip(1))
            for block in self.blocks:
                # Two passes through the same blocks, each of them checkpointed (pytorch#193193).
                x = checkpoint(block, x, use_reentrant=False) if self.passes > 1 else block(x)
            losses.append(F.cross_entropy(self.out(self.norm(x)).flatten(0, 1), tokens.flatten()))
        return torch.stack(losses).mean()


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length).view(batch, length) * 7 % WORDS


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "transformer": lambda: (Language(6, 256), _tokens(8, 256)),
    "llama-style": lambda: (Language(8, 128, gated=True), _tokens(8, 128)),
    "two-traversals": lambda: (Language(4, 128, passes=2), _tokens(8, 128)),
}
"""Of pytorch#197838 (not monotone on a model like Llama) and of pytorch#193193, as small as a CPU needs."""
