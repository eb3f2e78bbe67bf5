"""Vision Transformer (Dosovitskiy et al. 2020): image patches as tokens, and a class token read out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainfit.models.losses import class_loss


@dataclass(frozen=True)
class ViTConfig:
    """Shape of a ViT. The defaults are ViT-B/16's for 224 x 224 images and the 1000 ImageNet classes."""

    image_size: int = 224
    patch_size: int = 16
    classes: int = 1000
    layers: int = 12
    heads: int = 12
    hidden: int = 768

    @property
    def patches(self) -> int:
        """Number of patches in one image."""
        return (self.image_size // self.patch_size) ** 2


class SelfAttention(nn.Module):
    """Multi-head attention with one fused query-key-value projection."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.head_size = config.hidden // config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for part in self.qkv(hidden).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(start_dim=2))
        return projected


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added back after."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden, eps=1e-6)
        self.attention = SelfAttention(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden, eps=1e-6)
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        added: Tensor = self.down(F.gelu(self.up(self.feed_forward_norm(hidden))))
        return hidden + added


class ViT(nn.Module):
    """Class logits for `images`, or the mean loss when `labels` are given."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = nn.Conv2d(3, config.hidden, config.patch_size, stride=config.patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.hidden))
        self.position_embedding = nn.Parameter(torch.empty(1, config.patches + 1, config.hidden))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=1e-6)
        self.head = nn.Linear(config.hidden, config.classes)
        self.apply(_initialise)
        nn.init.normal_(self.position_embedding, std=0.02)
        # Small, so that all classes start about equally likely; not zero, or the first gradients would be.
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.finish(self.through(self.begin(images), self.blocks))
        return logits if labels is None else class_loss(logits, labels)

    def begin(self, images: Tensor) -> Tensor:
        """Do what comes before the blocks."""
        patches = self.patch_embedding(images).flatten(start_dim=2).transpose(1, 2)
        class_tokens = self.class_token.expand(len(images), -1, -1)
        return torch.cat((class_tokens, patches), dim=1) + self.position_embedding

    def through(self, hidden: Tensor, blocks: Iterable[nn.Module]) -> Tensor:
        """Run some of the blocks: all, or those of a pipeline's stage."""
        for block in blocks:
            hidden = block(hidden)
        return hidden

    def finish(self, hidden: Tensor) -> Tensor:
        """Do what comes after the blocks, up to the logits."""
        logits: Tensor = self.head(self.norm(hidden)[:, 0])
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Conv2d):
        inputs = module.in_channels * module.kernel_size[0] * module.kernel_size[1]
        nn.init.normal_(module.weight, std=math.sqrt(1 / inputs))
        assert module.bias is not None
        nn.init.zeros_(module.bias)
