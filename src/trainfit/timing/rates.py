"""What this machine's processor does at best: FLOP/s of matrix products, bytes per second of memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from trainfit.timing.clocks import cpu_clock

_SIZE = 1024
_CALLS = 7
_COPIED_BYTES = 256 << 20


def product_rate(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square matrix product; the median of some, after a first one."""
    left, right = (torch.rand(_SIZE, _SIZE).to(dtype) for _ in range(2))
    return 2 * _SIZE**3 / _median_seconds(lambda: torch.mm(left, right))


def copy_rate(largest_cache_bytes: int) -> float:
    """Return the bytes per second that are read and written when memory is copied that no cache holds."""
    size = max(_COPIED_BYTES, 4 * largest_cache_bytes)
    source, target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    return 2 * size / _median_seconds(lambda: target.copy_(source))


def _median_seconds(action: Callable[[], object]) -> float:
    clock, times = cpu_clock(), []
    action()
    for _ in range(_CALLS):
        begin = clock()
        action()
        times.append(clock() - begin)
    return statistics.median(times)
