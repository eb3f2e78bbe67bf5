"""A small transformer in ordinary PyTorch, and the parts of a training step that the cases share."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import trainfit

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 256, 32, 64, 4, 3


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        # With tensor parallelism each rank has some of the heads.
        q, k, v = (
            layer(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for layer in (self.wq, self.wk, self.wv)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, 4 * width)
        self.w2 = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.gelu(self.w1(x)))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    def __init__(
        self,
        width: int = WIDTH,
        layers: int = LAYERS,
        vocabulary: int = VOCABULARY,
        context: int = CONTEXT,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(TransformerBlock(width, HEADS) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        if places is None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def start(backend: str | None = None) -> torch.device:
    """Join the other processes, as the first lines of a script do; return the device of this one."""
    dist.init_process_group(backend or ("nccl" if torch.cuda.is_available() else "gloo"))
    if torch.cuda.is_available():
        torch.cuda.set_device(own_device())
    return own_device()


def own_device() -> torch.device:
    """Return the GPU of this process where there are GPUs, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return torch.device("cpu")


def token_batch(batch: int = 4, vocabulary: int = VOCABULARY, context: int = CONTEXT) -> torch.Tensor:
    """Return random tokens; the same on every rank, as the seed is."""
    return torch.randint(0, vocabulary, (batch, context)).to(own_device())


def token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def adamw(model: nn.Module, **options: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def usual_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    before_step: Callable[[], object] = lambda: None,
) -> trainfit.Step:
    """Return forward, loss, backward, optimizer; `before_step` runs when there are gradients."""

    def run() -> torch.Tensor:
        loss = token_loss(model(tokens), tokens)
        loss.backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model=model, optimizer=optimizer, run=run)
