"""Llama 2 and 3 (Touvron et al. 2023, Dubey et al. 2024): RMSNorm, rotary positions, SwiGLU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainfit.models.gpt2 import initialise
from trainfit.models.losses import next_token_loss

if TYPE_CHECKING:
    from trainfit.models.mixtral import MixtralConfig


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama. The defaults are Llama-2-7B's.

    There is no longest sequence here: rotary positions are computed for the sequence at hand. The
    frequency scaling of Llama 3.1 is left out; it changes numbers, not shapes, memory or time.
    """

    vocab_size: int = 32000
    layers: int = 32
    heads: int = 32
    kv_heads: int = 32
    hidden: int = 4096
    feed_forward: int = 11008
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-5

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


@dataclass(frozen=True)
class Rotation:
    """Cosine and sine of every position's angles, each (sequence, head size / 2)."""

    cosine: Tensor
    sine: Tensor

    @staticmethod
    def of_positions(positions: Tensor, head_size: int, theta: float, like: Tensor) -> Rotation:
        """Compute the angles in float32: bfloat16 cannot tell neighbouring positions apart."""
        exponents = torch.arange(0, head_size, 2, device=like.device, dtype=torch.float32) / head_size
        angles = torch.outer(positions.to(torch.float32), theta**-exponents)
        return Rotation(angles.cos().to(like.dtype), angles.sin().to(like.dtype))

    def apply(self, vectors: Tensor) -> Tensor:
        """Turn each pair (i, i + half) of `vectors` (batch, heads, sequence, head size) by its angle."""
        first, second = vectors.chunk(2, dim=-1)
        return torch.cat(
            (first * self.cosine - second * self.sine, second * self.cosine + first * self.sine), dim=-1
        )


class GroupedQueryAttention(nn.Module):
    """Causal attention in which several query heads share one key and value head."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.shares_keys = kv_heads != heads
        self.query = nn.Linear(hidden, heads * self.head_size, bias=False)
        self.key = nn.Linear(hidden, kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(hidden, kv_heads * self.head_size, bias=False)
        self.output = nn.Linear(heads * self.head_size, hidden, bias=False)

    def forward(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        query = rotation.apply(self._heads(self.query(hidden)))
        key = rotation.apply(self._heads(self.key(hidden)))
        value = self._heads(self.value(hidden))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.shares_keys)
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(start_dim=2))
        return projected

    def _heads(self, projected: Tensor) -> Tensor:
        batch, seq, _ = projected.shape
        return projected.view(batch, seq, -1, self.head_size).transpose(1, 2)


class SwiGLU(nn.Module):
    """Feed-forward whose widened half is gated by SiLU of the other half (Shazeer 2020)."""

    def __init__(self, hidden: int, feed_forward: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, feed_forward, bias=False)
        self.up = nn.Linear(hidden, feed_forward, bias=False)
        self.down = nn.Linear(feed_forward, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        narrowed: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return narrowed


class Block(nn.Module):
    """Attention and SwiGLU, each normalised before and added back after."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.attention = GroupedQueryAttention(config.hidden, config.heads, config.kv_heads)
        self.feed_forward_norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.feed_forward = SwiGLU(config.hidden, config.feed_forward)

    def forward(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation)
        added: Tensor = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + added


class Llama(nn.Module):
    """The language model: logits for `tokens`, or the mean next-token loss when `labels` are given.

    `positions` says where in their sequence the tokens are, if they are not all of it.
    """

    block_class: type[nn.Module] = Block

    def __init__(self, config: LlamaConfig | MixtralConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.blocks = nn.ModuleList(self.block_class(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self.apply(initialise)

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        hidden = self.begin(tokens)
        rotation = self.rotation(tokens.shape[1], hidden, positions)
        logits = self.finish(self.through(hidden, self.blocks, rotation))
        return logits if labels is None else next_token_loss(logits, labels)

    def begin(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Do what comes before the blocks."""
        embedded: Tensor = self.token_embedding(tokens)
        return embedded

    def rotation(self, seq: int, like: Tensor, positions: Tensor | None = None) -> Rotation:
        """Return how the positions of a sequence are turned, in the dtype and on the device of a tensor."""
        if positions is None:
            positions = torch.arange(seq, device=like.device, dtype=torch.float32)
        return Rotation.of_positions(positions, self.config.head_size, self.config.rope_theta, like=like)

    def through(self, hidden: Tensor, blocks: Iterable[nn.Module], rotation: Rotation) -> Tensor:
        """Run some of the blocks: all, or those of a pipeline's stage."""
        for block in blocks:
            hidden = block(hidden, rotation)
        return hidden

    def finish(self, hidden: Tensor) -> Tensor:
        """Do what comes after the blocks, up to the logits."""
        logits: Tensor = self.head(self.norm(hidden))
        return logits
