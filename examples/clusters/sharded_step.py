"""A sharded training step with everything that people ask about as a parameter.

    trainfit estimate examples/clusters/sharded_step.py:build --mesh dp=8 --device h100 --set reduce=fp32

The same function runs under torchrun. Every argument has a question of docs/cluster-questions.md.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import trainfit

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.output(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention, self.feed_forward = Attention(width, heads), FeedForward(width)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(x)
        if self.recompute == "feed-forward":
            return checkpoint(self.feed_forward, x, use_reentrant=False)
        return self.feed_forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute == "block":
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, recompute: list[str]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, recompute[n % len(recompute)]) for n in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(
    mesh: DeviceMesh,
    batch: int = 4,
    seq: int = 256,
    device: str = "cpu",
    layers: int = 4,
    wrap: str = "blocks",  # blocks, parts (attention and feed-forward), or root
    params: str = "bf16",  # what parameters are gathered and computed in
    reduce: str = "bf16",  # what gradients are reduced in
    offload: bool = False,  # parameters, gradients and optimizer state on the CPU
    reshard: bool = True,  # after forward
    reshard_to: int = 0,  # ranks of a smaller group to reshard to after forward; 0: all of them
    recompute: str = "none",  # none, block, feed-forward; several with + for the blocks in turn
) -> trainfit.Step:
    """Return one step of a rank."""
    with torch.device("cpu" if offload else device):
        model = Transformer(layers, 256, 8, 4096, recompute.split("+"))
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[params], reduce_dtype=DTYPES[reduce])
    how = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy(),
    }
    after = reshard_to or reshard
    for block in model.blocks if wrap != "root" else ():
        for part in (block.attention, block.feed_forward) if wrap == "parts" else ():
            fully_shard(part, reshard_after_forward=after, **how)
        fully_shard(block, reshard_after_forward=after, **how)
    fully_shard(model, **how)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 4096, (batch, seq), device=device)

    def run() -> torch.Tensor:
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model=model, optimizer=optimizer, run=run, samples=batch, tokens=batch * seq)
