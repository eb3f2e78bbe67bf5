"""Seconds for a matrix product on a GPU: tiles on multiprocessors, in waves, whichever tiling is fastest."""

from __future__ import annotations

import math
from functools import lru_cache

from trainfit.operators.matrix_products import Product

# Rows and columns of a tile, and its speed against the largest: small tiles load more for each product.
_TILES = (
    *((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 128, 0.8)),
    *((64, 64, 0.62), (128, 32, 0.5), (32, 128, 0.5), (64, 32, 0.36), (32, 64, 0.36)),
)
_LEAST_SPLIT = 256
"""Splitting the summed dimension further than this is not worth a second pass over the result."""


@lru_cache(maxsize=65536)
def tiled_seconds(
    product: Product, flops_per_second: float, multiprocessors: int, fill: float, bytes_per_second: float
) -> float:
    """Return the time of the fastest tiling: waves of tiles, each `fill` steps longer than its sum."""
    if not product.flops:
        return 0.0
    per_multiprocessor = flops_per_second / multiprocessors
    best = math.inf
    for rows, columns, speed in _TILES:
        tiles = product.batch * -(-product.m // rows) * -(-product.n // columns)
        step = 2.0 * rows * columns / (per_multiprocessor * speed)
        for split in _splits(tiles, product.k, multiprocessors):
            waves = _waves(tiles * split / multiprocessors)
            seconds = waves * step * (product.k / split + fill)
            if split > 1:  # partial sums are written in float32, read and added up
                seconds += 8.0 * split * product.batch * product.m * product.n / bytes_per_second
            best = min(best, seconds)
    return best


def _splits(tiles: int, k: int, multiprocessors: int) -> tuple[int, ...]:
    if tiles >= multiprocessors or k < 2 * _LEAST_SPLIT:
        return (1,)
    most = min(multiprocessors // tiles + 1, k // _LEAST_SPLIT, 64)
    return tuple(dict.fromkeys((1, *(2**power for power in range(1, 7) if 2**power <= most), most)))


def _waves(full: float) -> float:
    """Return how many rounds the tiles need: whole ones, but in the last some multiprocessors help out."""
    return max(1.0, (full + math.ceil(full)) / 2)
