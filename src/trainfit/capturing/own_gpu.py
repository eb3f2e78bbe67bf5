"""Which GPU of its node the process has: the first, or the one of its local rank. There is no other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainfit.capturing.values import user_line
from trainfit.errors import CaptureError
from trainfit.traces.ranks import Cluster

_own: tuple[int, int] = (0, 1)
"""The number of the GPU, and how many its node has."""


@contextlib.contextmanager
def gpu_of(cluster: Cluster | None) -> Iterator[None]:
    """Have the GPU of a rank; without a cluster the only one."""
    global _own
    before = _own
    if cluster is not None:
        _own = (cluster.local_rank, cluster.local_world_size)
    moved = _own[0] != before[0]
    if moved:
        _forget_fake_results()
    try:
        yield
    finally:
        _own = before
        if moved:
            _forget_fake_results()


def _forget_fake_results() -> None:
    """Let torch's fake tensors forget what they returned: their answers name the GPU that there was."""
    FakeTensorMode.cache_clear()


def own_number() -> int:
    """Return the number of the GPU."""
    return _own[0]


def own_device() -> torch.device:
    """Return the GPU as torch names it."""
    return torch.device("cuda", _own[0])


def gpus_of_node() -> int:
    """Return how many GPUs the node has."""
    return _own[1]


def number_of_gpu(place: Any) -> int | None:
    """Return 1 for `"cuda:1"`, `torch.device("cuda", 1)` and 1, the own number for `"cuda"`; None: no GPU."""
    if isinstance(place, torch.device):
        number = own_number() if place.index is None else place.index
        return number if place.type == "cuda" else None
    if type(place) is int:
        return place if place >= 0 else own_number()
    if isinstance(place, str) and place.split(":")[0] == "cuda":
        text = place.partition(":")[2]
        return int(text) if text.isdecimal() else own_number()
    return None


def refuse_second_gpu(place: Any) -> None:
    """Stop at a GPU that is not the own one: what several of them hold must not be added up on one."""
    number = number_of_gpu(place)
    if number is None or number == own_number():
        return
    if gpus_of_node() > 1:
        raise CaptureError(
            f"the step uses cuda:{number} ({user_line()}), but the GPU of the rank that is captured is "
            f"cuda:{own_number()}, by its LOCAL_RANK: what the GPUs of other ranks hold is not added up."
        )
    raise CaptureError(
        f"the step uses a second GPU, cuda:{number} ({user_line()}), but trainfit predicts what one GPU "
        "does, cuda:0. Give it a step with the part of the model that one GPU has."
    )
