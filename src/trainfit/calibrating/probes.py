"""The microbenchmarks: single calls of torch on made-up tensors, in groups that are measured together.

A probe says what is called and on which tensors; nothing is allocated here. The same probe is run for the
clock (`probing`) and captured for the roofline (`solving`), so that both are about the same call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The rates that are measured, and in which dtype their tensors are."""
TINY_CALLS = 32
"""Kernels in a row: few enough that the host has launched all while the GPU still waits for the first."""
CACHED_CALLS = 8
LARGE = ("_large", "_half")
"""How the names of products end that show what is possible at best."""
_LIST_TENSORS = 64
_LEAST_SIDE = 128
"""Smaller products say nothing about a device."""


@dataclass(frozen=True)
class Wanted:
    """A tensor that a probe needs."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    trained: bool = False
    """Whether backward computes its gradient."""
    below: int = 0
    """If not 0, it holds whole numbers from 0 to this, without it."""


@dataclass(frozen=True)
class Probe:
    """One microbenchmark: a call, the tensors that it gets, and what is known about its work."""

    name: str
    """Without dots: it is also the name of a module."""
    call: Callable[..., Any]
    tensors: tuple[Wanted, ...]
    rate: str = "fp32"
    """One of `DTYPES`: what its products count as."""
    flops: int = 0
    """Of its forward, for products."""
    moved_bytes: int = 0
    """Of its forward, for what only moves memory."""

    @property
    def backward(self) -> bool:
        """Whether its backward is measured, too."""
        return any(wanted.trained for wanted in self.tensors)


@dataclass(frozen=True)
class ProbeSizes:
    """How large the probes are."""

    side: int
    """Of the largest square product."""
    stream_bytes: int
    """Of each tensor that is read or written straight through; more than any cache holds."""
    images: int
    """Images with 256 channels in a batch."""
    pixels: int
    """Side of an image."""
    sequences: int
    """In a batch of attention with 16 heads of 64 values."""
    tokens: int
    """Of each sequence."""
    cache_bytes: int = 0
    """Of the last-level cache, an eighth of which one probe fills; without it there is no such probe."""

    def halved(self) -> ProbeSizes | None:
        """Return sizes that need half the memory or less; None if smaller ones would say nothing."""
        if self.side // 2 < _LEAST_SIDE:
            return None
        return replace(
            self,
            side=self.side // 2,
            stream_bytes=self.stream_bytes // 2,
            images=max(self.images // 2, 1),
            sequences=max(self.sequences // 2, 1),
        )


def products(sizes: ProbeSizes, rates: tuple[str, ...]) -> tuple[Probe, ...]:
    """Return products of each dtype: large ones, of the shapes that steps have, and odd ones."""
    side = sizes.side
    shapes = {
        "large": (side, side, side),
        "half": (side // 2, side // 2, side // 2),
        "tall": (side, side // 8, side // 2),
        "wide": (side // 2, side, side // 8),
        "deep": (side // 8, side // 8, side),
        "medium": (side // 4, side // 4, side // 4),
        "odd": (side // 2 - 1, side // 8 + 3, side // 4 - 5),
    }
    return tuple(
        Probe(
            f"{rate}_{name}",
            torch.mm,
            (Wanted((m, k), DTYPES[rate]), Wanted((k, n), DTYPES[rate])),
            rate,
            flops=2 * m * n * k,
        )
        for rate in rates
        for name, (m, n, k) in shapes.items()
    )


def memory(sizes: ProbeSizes) -> tuple[Probe, ...]:
    """Return what only moves memory: straight through, reducing, transposing, gathering, over lists."""
    size = sizes.stream_bytes
    rows = max(size // 4 // 1024, 2)
    flat, table = Wanted((size // 4,)), Wanted((rows, 1024))
    row, half = Wanted((1, 1024)), Wanted((rows, 512))
    index = Wanted((rows,), torch.int64, below=rows)
    part = max(rows * 1024 // _LIST_TENSORS, 1)
    found = [
        Probe("copy", lambda a, b: b.copy_(a), (flat, flat), moved_bytes=2 * size),
        Probe("add", torch.add, (flat, flat), moved_bytes=3 * size),
        Probe("gelu", F.gelu, (flat,), moved_bytes=2 * size),
        Probe("softmax", lambda x: F.softmax(x, -1), (table,)),
        Probe("layer_norm", lambda x: F.layer_norm(x, (1024,)), (table,)),
        Probe("sum", lambda x: torch.sum(x, 0), (table,)),
        Probe("broadcast", torch.add, (table, row)),
        Probe("cast", lambda x: x.to(torch.bfloat16), (flat,)),
        Probe("join", lambda a, b: torch.cat((a, b), 1), (half, half)),
        Probe("transpose", lambda x: x.t().contiguous(), (table,)),
        Probe("gather", lambda x, rows: F.embedding(rows, x), (replace(table, trained=True), index)),
        Probe("list", lambda *all: torch._foreach_mul_(list(all), 0.999), (Wanted((part,)),) * _LIST_TENSORS),
        Probe("tiny", _many_tiny, (Wanted((16,)), Wanted((16,)))),
    ]
    if sizes.cache_bytes:
        cached = Wanted((max(sizes.cache_bytes // 4 // 3 // 4, 1),))
        found.append(Probe("cached", _add_again, (cached, cached, cached)))
    return tuple(found)


def _many_tiny(a: torch.Tensor, b: torch.Tensor) -> None:
    for _ in range(TINY_CALLS):
        torch.add(a, b)


def _add_again(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Add again and again: from the second time on, all is where the time before has left it."""
    for _ in range(CACHED_CALLS):
        torch.add(a, b, out=out)


def convolutions(sizes: ProbeSizes, rates: tuple[str, ...]) -> tuple[Probe, ...]:
    """Return convolutions of each kind in both layouts: plain, in groups, depthwise."""
    # Name, channels, channels per group, side of the filter.
    kinds = (
        ("plain", 256, 256, 3),
        ("pointwise", 256, 256, 1),
        ("grouped_narrow", 512, 16, 3),
        ("grouped_wide", 1024, 32, 3),
        ("grouped_odd", 240, 24, 3),
        ("depthwise_small", 256, 1, 3),
        ("depthwise_large", 256, 1, 7),
    )
    return tuple(
        Probe(
            f"{kind}_{rate}_{'nhwc' if last else 'nchw'}",
            _Convolution(channels // per_group, side // 2),
            (
                Wanted((sizes.images, channels, sizes.pixels, sizes.pixels), DTYPES[rate], last, True),
                Wanted((channels, per_group, side, side), DTYPES[rate], last, True),
            ),
            rate,
        )
        for kind, channels, per_group, side in kinds
        for rate in rates
        for last in (False, True)
    )


@dataclass(frozen=True)
class _Convolution:
    """Calls a convolution of a kind."""

    groups: int
    padding: int

    def __call__(self, images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(images, weight, padding=self.padding, groups=self.groups)


def attention(sizes: ProbeSizes, rates: tuple[str, ...]) -> tuple[Probe, ...]:
    """Return fused attention with and without a causal mask."""
    return tuple(
        Probe(
            f"attention_{rate}{'_causal' if causal else ''}",
            _Attention(causal),
            (Wanted((sizes.sequences, 16, sizes.tokens, 64), DTYPES[rate], trained=True),) * 3,
            rate,
        )
        for rate in rates
        for causal in (False, True)
    )


@dataclass(frozen=True)
class _Attention:
    """Calls fused attention."""

    causal: bool

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
