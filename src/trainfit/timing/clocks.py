"""How calls are timed: by the wall clock, by the thread's processor time, or by the GPU's events."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from trainfit.devices.hardware import CUDA, Cuda

_SLEEP_CYCLES = 1_000_000

Timed = Callable[[Any, list[Any], dict[str, Any]], tuple[float, Any]]
"""Calls a function with these arguments; returns the seconds and the result."""


def cpu_clock() -> Callable[[], float]:
    """Return the clock for work on the CPU.

    With one thread it counts the time that the thread has really run: what other processes take from its
    core is no part of the operator. With several threads only the wall clock tells when all are done.
    """
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def timed_on(device: str, cuda: Cuda = CUDA) -> Timed:
    """Return the function that times one call on `cpu` or `cuda`."""
    if device == "cuda":
        return functools.partial(_cuda_seconds, cuda)
    clock = cpu_clock()

    def cpu_seconds(function: Any, positional: list[Any], keyword: dict[str, Any]) -> tuple[float, Any]:
        begin = clock()
        result = function(*positional, **keyword)
        return clock() - begin, result

    return cpu_seconds


def _cuda_seconds(
    cuda: Cuda, function: Any, positional: list[Any], keyword: dict[str, Any]
) -> tuple[float, Any]:
    begin, end = cuda.event(), cuda.event()
    # The GPU is kept busy until everything is launched, so that it does not wait between the two events.
    cuda.sleep(_SLEEP_CYCLES)
    begin.record()
    result = function(*positional, **keyword)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, result
