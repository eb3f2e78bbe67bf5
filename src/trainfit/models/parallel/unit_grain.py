"""Which modules of a model of ours FSDP gathers as units: its blocks, their parts, or the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

from torch import nn

Grain = Literal["blocks", "parts", "whole"]
GRAINS: tuple[Grain, ...] = get_args(Grain)
_grain: ContextVar[Grain] = ContextVar("grain", default="blocks")


@contextmanager
def units_are(grain: Grain) -> Iterator[None]:
    """Build models with these units inside."""
    token = _grain.set(grain)
    try:
        yield
    finally:
        _grain.reset(token)


def units_among(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the units of a model with these blocks, those inside of others first."""
    match _grain.get():
        case "whole":
            return []
        case "parts":
            parts = [[child for child in block.children() if _has_products(child)] for block in blocks]
            return [unit for block, own in zip(blocks, parts) for unit in (*own, block)]
        case _:
            return list(blocks)


def _has_products(module: nn.Module) -> bool:
    """Whether a part of a block is worth a gather of its own: norms are not."""
    return any(parameter.dim() > 1 for parameter in module.parameters())
