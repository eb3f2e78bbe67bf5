"""GPT-2 (Radford et al. 2019): pre-norm decoder, learned positions, GELU, head tied to the embedding."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainfit.models.losses import next_token_loss


@dataclass(frozen=True)
class GPT2Config:
    """Shape of a GPT-2. The defaults are the 124M model's."""

    vocab_size: int = 50257
    context: int = 1024
    layers: int = 12
    heads: int = 12
    hidden: int = 768
    dropout: float = 0.1


class SelfAttention(nn.Module):
    """Causal multi-head attention with one fused query-key-value projection."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.head_size = config.hidden // config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, seq, _ = hidden.shape
        # How many heads there are is read off the projection: under tensor parallelism a rank has some.
        query, key, value = (
            part.view(batch, seq, -1, self.head_size).transpose(1, 2)
            for part in self.qkv(hidden).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        projected: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, seq, -1))
        return projected


class FeedForward(nn.Module):
    """Widen four times, GELU (the tanh form that GPT-2 was trained with), narrow again."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        narrowed: Tensor = self.down(F.gelu(self.up(hidden), approximate="tanh"))
        return narrowed


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added back after."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = SelfAttention(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        added: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))
        return hidden + added


class GPT2(nn.Module):
    """The language model: logits for `tokens`, or the mean next-token loss when `labels` are given.

    `positions` says where in their sequence the tokens are, if they are not all of it.
    """

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.hidden)
        self.position_embedding = nn.Embedding(config.context, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self.apply(initialise)
        self._shrink_residual_projections()
        self.head.weight = self.token_embedding.weight

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        logits = self.finish(self.through(self.begin(tokens, positions), self.blocks))
        return logits if labels is None else next_token_loss(logits, labels)

    def begin(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Do what comes before the blocks."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: Tensor = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        return embedded

    def through(self, hidden: Tensor, blocks: Iterable[nn.Module]) -> Tensor:
        """Run some of the blocks: all, or those of a pipeline's stage."""
        for block in blocks:
            hidden = block(hidden)
        return hidden

    def finish(self, hidden: Tensor) -> Tensor:
        """Do what comes after the blocks, up to the logits."""
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def _shrink_residual_projections(self) -> None:
        """Start what is added to the residual smaller, so that its variance does not grow with depth."""
        std = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.output.weight", "feed_forward.down.weight")):
                nn.init.normal_(parameter, std=std)


def initialise(module: nn.Module) -> None:
    """Draw projections and embeddings from a normal distribution; biases start at zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
