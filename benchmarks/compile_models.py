"""Models that `compile_plans.py` compiles: transformers, two that torch's own budget fails on, and others."""

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


class Dropped(Language):
    """The same with dropout after the embedding and after every block: random operators."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__(blocks, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embedding(tokens))
        for block in self.blocks:
            x = self.drop(block(x))
        return F.cross_entropy(self.out(self.norm(x)).flatten(0, 1), tokens.flatten())


class Autocast(Language):
    """The same with its products in bfloat16."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(tokens)


class Translation(nn.Module):
    """An encoder and a decoder that reads what the encoder made in every layer: a value that lives long."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 4, 4 * width, 0.0, batch_first=True) for _ in range(layers)
        )
        self.out = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        memory = self.embedding(tokens)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.embedding(tokens.flip(1))
        for layer in self.decoder:
            x = layer(x, memory)
        return F.cross_entropy(self.out(x).flatten(0, 1), tokens.flatten())


class Experts(nn.Module):
    """Blocks with experts that all compute and are weighed by a router: a mixture without graph breaks."""

    def __init__(self, width: int, blocks: int, experts: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.mixing = nn.ModuleList(Block(width, 4, gated=False) for _ in range(blocks))
        self.router = nn.ModuleList(nn.Linear(width, experts) for _ in range(blocks))
        scale = width**-0.5
        shape = (blocks, experts, width, 2 * width)
        self.up = nn.Parameter(torch.randn(shape) * scale)
        self.down = nn.Parameter(torch.randn(shape).transpose(2, 3) * scale)
        self.out = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, (block, router) in enumerate(zip(self.mixing, self.router)):
            x = block(x)
            scores = router(x)
            least = scores.topk(2, -1).values[..., -1:]
            share = scores.masked_fill(scores < least, float("-inf")).softmax(-1)
            middle = F.gelu(torch.einsum("btw,ewh->ebth", x, self.up[number]))
            x = x + torch.einsum("ebth,ehw,bte->btw", middle, self.down[number], share)
        return F.cross_entropy(self.out(x).flatten(0, 1), tokens.flatten())


class Double(nn.Sequential):
    """Two convolutions with batch norm."""

    def __init__(self, given: int, made: int) -> None:
        layers: list[nn.Module] = []
        for width in (given, made):
            layers += [nn.Conv2d(width, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Down and up again, with values that cross from the first half to the second."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.down = nn.ModuleList(Double(a, b) for a, b in zip((3, *widths), widths))
        pairs = list(zip(widths[:0:-1], widths[-2::-1]))
        self.wider = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(Double(2 * b, b) for _, b in pairs)
        self.out = nn.Conv2d(widths[0], 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        crossing = []
        for number, part in enumerate(self.down):
            x = part(x if number == 0 else F.max_pool2d(x, 2))
            crossing.append(x)
        for wider, part in zip(self.wider, self.up):
            crossing.pop()
            x = part(torch.cat((wider(x), crossing[-1]), 1))
        return self.out(x).square().mean()


class Residual(nn.Module):
    """Convolutions with batch norm around which the input is added (ResNet), or kept beside (DenseNet)."""

    def __init__(self, width: int, blocks: int, *, dense: bool = False) -> None:
        super().__init__()
        self.dense = dense
        self.first = nn.Conv2d(3, width, 3, padding=1)
        given = [width * (n + 1) if dense else width for n in range(blocks)]
        self.blocks = nn.ModuleList(Double(g, width) for g in given)
        self.out = nn.Linear(width * (blocks + 1) if dense else width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.cat((x, block(x)), 1) if self.dense else x + block(x)
        return self.out(x.mean((2, 3))).square().mean()


class Depthwise(nn.Module):
    """Convolutions of each channel, layer norm and two products (ConvNeXt)."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 4, stride=4)
        self.spread = nn.ModuleList(
            nn.Conv2d(width, width, 7, padding=3, groups=width) for _ in range(blocks)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for spread, norm, up, down in zip(self.spread, self.norm, self.up, self.down):
            y = norm(spread(x).permute(0, 2, 3, 1))
            x = x + down(F.gelu(up(y))).permute(0, 3, 1, 2)
        return x.square().mean()


class Mixer(nn.Module):
    """Products over the places, then over the channels (MLP-Mixer)."""

    def __init__(self, places: int, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.over = nn.ModuleList(
            nn.Sequential(nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n))
            for _ in range(blocks)
            for n in (places, width)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * blocks))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, (over, norm) in enumerate(zip(self.over, self.norm)):
            y = norm(x)
            x = x + (over(y) if number % 2 else over(y.transpose(1, 2)).transpose(1, 2))
        return x.square().mean()


class Unrolled(nn.Module):
    """A recurrent cell, step by step: a long chain of small values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.cell = nn.GRUCell(width, width)
        self.out = nn.Linear(width, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        state, states = torch.zeros_like(x[:, 0]), []
        for place in range(tokens.shape[1]):
            state = self.cell(x[:, place], state)
            states.append(state)
        return F.cross_entropy(self.out(torch.stack(states, 1)).flatten(0, 1), tokens.flatten())


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length).view(batch, length) * 7 % WORDS


def _images(batch: int, size: int) -> torch.Tensor:
    return torch.linspace(-1, 1, batch * 3 * size * size).view(batch, 3, size, size)


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "transformer": lambda: (Language(3, 256), _tokens(8, 128)),
    # Of pytorch#197838 (not monotone on a model like Llama) and of pytorch#193193, as small as a CPU needs.
    "llama-style": lambda: (Language(4, 128, gated=True), _tokens(8, 128)),
    "two-traversals": lambda: (Language(2, 128, passes=2), _tokens(8, 128)),
    "dropout": lambda: (Dropped(2, 128), _tokens(8, 128)),
    "autocast": lambda: (Autocast(2, 128), _tokens(8, 128)),
    "encoder-decoder": lambda: (Translation(128, 2), _tokens(8, 96)),
    "experts": lambda: (Experts(96, 2, 4), _tokens(8, 96)),
    "u-net": lambda: (UNet((8, 16, 32)), _images(4, 64)),
    "residual": lambda: (Residual(16, 4), _images(8, 32)),
    "dense": lambda: (Residual(8, 4, dense=True), _images(8, 32)),
    "depthwise": lambda: (Depthwise(32, 4), _images(8, 64)),
    "mixer": lambda: (Mixer(64, 96, 3), _tokens(16, 64)),
    "recurrent": lambda: (Unrolled(96), _tokens(64, 10)),
}
