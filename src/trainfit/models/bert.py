"""BERT (Devlin et al. 2018) with its masked-token head, tied to the token embedding; no pooler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainfit.models.gpt2 import initialise
from trainfit.models.losses import class_loss


@dataclass(frozen=True)
class BertConfig:
    """Shape of a BERT. The defaults are bert-base-uncased's."""

    vocab_size: int = 30522
    context: int = 512
    token_types: int = 2
    layers: int = 12
    heads: int = 12
    hidden: int = 768
    dropout: float = 0.1


class Embeddings(nn.Module):
    """Sum of token, position and token-type embedding, normalised. All tokens are of type 0."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden)
        self.position = nn.Embedding(config.context, config.hidden)
        self.token_type = nn.Embedding(config.token_types, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        summed = self.token(tokens) + self.token_type(torch.zeros_like(tokens)) + self.position(positions)
        embedded: Tensor = self.dropout(self.norm(summed))
        return embedded


class SelfAttention(nn.Module):
    """Multi-head attention in which every token sees every other."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.head_size = config.hidden // config.heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key = nn.Linear(config.hidden, config.hidden)
        self.value = nn.Linear(config.hidden, config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(start_dim=2))
        return projected


class Layer(nn.Module):
    """Attention and feed-forward, each added back and normalised *after* (post-norm)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)
        self.feed_forward_norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden)))
        widened = F.gelu(self.up(hidden))
        normalised: Tensor = self.feed_forward_norm(hidden + self.dropout(self.down(widened)))
        return normalised


class MaskedTokenHead(nn.Module):
    """Transform and norm, then scores over the vocabulary with a bias of their own."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = nn.Linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.decoder = nn.Linear(config.hidden, config.vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.decoder(self.norm(F.gelu(self.transform(hidden))))
        return scores


class Bert(nn.Module):
    """Logits for `tokens`, or the mean loss over the positions whose label is not -100.

    `positions` says where in their sequence the tokens are, if they are not all of it.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.head = MaskedTokenHead(config)
        self.apply(initialise)
        self.head.decoder.weight = self.embeddings.token.weight

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        logits = self.finish(self.through(self.begin(tokens, positions), self.layers))
        return logits if labels is None else class_loss(logits, labels)

    def begin(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Do what comes before the layers."""
        embedded: Tensor = self.embeddings(tokens, positions)
        return embedded

    def through(self, hidden: Tensor, layers: Iterable[nn.Module]) -> Tensor:
        """Run some of the layers: all, or those of a pipeline's stage."""
        for layer in layers:
            hidden = layer(hidden)
        return hidden

    def finish(self, hidden: Tensor) -> Tensor:
        """Do what comes after the layers, up to the logits."""
        logits: Tensor = self.head(hidden)
        return logits
