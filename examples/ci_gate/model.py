"""The step that is guarded: a small language model, as its training script has it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import trainfit

VOCABULARY, WIDTH, LAYERS = 8192, 256, 4


class FeedForward(nn.Module):
    """Two linear layers with an activation between them."""

    def __init__(self, width: int, inner: int) -> None:
        """Make the layers."""
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Widen, activate, narrow."""
        out: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return out


class Layer(nn.Module):
    """Attention and a feed-forward part, each added to what comes in."""

    def __init__(self, width: int) -> None:
        """Make the parts."""
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layer makes of a batch of sequences."""
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        out: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class LanguageModel(nn.Module):
    """Embedding, layers, head."""

    def __init__(self) -> None:
        """Make the parts."""
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a score for each next token."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        scores: torch.Tensor = self.head(x)
        return scores


def build(batch: int = 16, seq: int = 256, device: str = "cpu") -> trainfit.Step:
    """Return model, optimizer and one iteration of training."""
    model = LanguageModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(0, VOCABULARY, (batch, seq + 1), device=device)

    def run() -> torch.Tensor:
        scores = model(tokens[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model=model, optimizer=optimizer, run=run)
