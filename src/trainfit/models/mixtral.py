"""Mixtral (Jiang et al. 2024): a Llama whose feed-forward is a choice of two experts per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainfit.models.llama import GroupedQueryAttention, Llama, Rotation, SwiGLU


@dataclass(frozen=True)
class MixtralConfig:
    """Shape of a Mixtral. The defaults are Mixtral-8x7B's."""

    vocab_size: int = 32000
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 4096
    feed_forward: int = 14336
    experts: int = 8
    experts_per_token: int = 2
    rope_theta: float = 1e6
    norm_epsilon: float = 1e-5

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


class Experts(nn.ModuleList):
    """Add up what the chosen experts return for each token, weighted."""

    @property
    def num_experts(self) -> int:
        """How many there are; what transformers calls it, too."""
        return len(self)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        combined = torch.zeros_like(tokens)
        for number, expert in enumerate(self):
            # How many tokens an expert gets depends on their values: these two have a data-dependent shape.
            rows, slots = torch.nonzero(chosen == number, as_tuple=True)
            answer = expert(tokens[rows]) * weights[rows, slots, None]
            combined.index_add_(0, rows, answer.to(combined.dtype))
        return combined


class MixtureOfExperts(nn.Module):
    """Send each token to its best experts and add up what they return, weighted by the router.

    The load-balancing loss is left out: it reads only the router's scores, a few numbers per token.
    """

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = Experts(SwiGLU(config.hidden, config.feed_forward) for _ in range(config.experts))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(end_dim=-2)
        scores, chosen = self.router(tokens).topk(self.experts_per_token, dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(tokens.dtype)
        combined: Tensor = self.experts(tokens, chosen, weights)
        return combined.view_as(hidden)


class Block(nn.Module):
    """Attention and experts, each normalised before and added back after."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.attention = GroupedQueryAttention(config.hidden, config.heads, config.kv_heads)
        self.mixture_norm = nn.RMSNorm(config.hidden, eps=config.norm_epsilon)
        self.mixture = MixtureOfExperts(config)

    def forward(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation)
        added: Tensor = self.mixture(self.mixture_norm(hidden))
        return hidden + added


class Mixtral(Llama):
    """A Llama of these blocks."""

    block_class = Block
