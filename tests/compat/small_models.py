"""Small models that the tests of the trackers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Module):
    """Two products with dropout and a norm, around which the input is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 2 * width)
        self.act = nn.ReLU()
        self.narrow = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.drop(self.narrow(self.act(self.wide(x))))) + x


class Tower(nn.Module):
    """Several of them in a row; all but the first may be checkpointed."""

    def __init__(self, width: int = 64, depth: int = 3, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(width) for _ in range(depth))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            again = self.checkpointed and number
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return x


@dataclass
class Answer:
    """What is no container of tensors to torch."""

    logits: torch.Tensor
    note: str = ""


class Wrapped(nn.Module):
    """A model whose result is a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Tower(16, 2)

    def forward(self, x: torch.Tensor) -> Answer:
        return Answer(self.inner(x))


class Twice(nn.Module):
    """One module that is called twice, and is in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Mlp(16)
        self.second = self.first
        self.last = nn.Sequential(nn.Flatten(1), nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x)))


@dataclass(frozen=True)
class Shape:
    """Of the transformer below."""

    layers: int = 4
    heads: int = 12
    width: int = 768
    vocabulary: int = 8192
    length: int = 1024
    dropout: float = 0.1


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(shape.width, shape.width, bias=False))
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, None, self.dropout, True)
        return self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, -1)))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wide = nn.Linear(shape.width, 4 * shape.width)
        self.act = nn.GELU()
        self.narrow = nn.Linear(4 * shape.width, shape.width)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.narrow(self.act(self.wide(x))))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    """Tokens to logits, with learned positions; the last product has the weights of the first table."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.drop = nn.Dropout(shape.dropout)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(places))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x)).float()


def plain(snapshot: Any) -> dict[str, dict[str, int]]:
    """Return a snapshot, of torch's tracker or ours, with texts as keys."""
    return {
        str(device): {getattr(kind, "value", kind): size for kind, size in sizes.items()}
        for device, sizes in snapshot.items()
    }
