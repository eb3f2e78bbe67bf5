"""The processes that train together ask each other: every one answers, and all of them get all answers.

Answers are data, sent as JSON text over the training's own process group. Where a process fails, all of them
stop at the same place, each with an error, instead of waiting for one that is gone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trainfit.basics.decoding import parse_json
from trainfit.errors import PlanError
from trainfit.traces.ranks import Cluster


def own_cluster() -> Cluster | None:
    """Return which process of how many this one is; None if it has no process group."""
    if dist.is_available() and dist.is_initialized():
        size = dist.get_world_size()
        beside = os.environ.get("LOCAL_WORLD_SIZE", "")
        per_node = int(beside) if beside.isdecimal() and 0 < int(beside) <= size else size
        return Cluster(size, dist.get_rank(), gpus_per_node=per_node)
    named = os.environ.get("WORLD_SIZE", "")
    if named.isdecimal() and int(named) > 1:
        raise PlanError(
            f"this is one of {named} processes (WORLD_SIZE), which cannot agree on a plan before they have a "
            "process group: call torch.distributed.init_process_group first, and plan when the model is "
            "divided among them."
        )
    return None


class Ranks:
    """All processes that train together; one that trains alone asks only itself."""

    def __init__(self, cluster: Cluster | None) -> None:
        """Take the process that this one is."""
        self.cluster = cluster
        self.rank = 0 if cluster is None else cluster.rank
        self.count = 1 if cluster is None else cluster.world_size

    def each(self, answer: Callable[[], Any]) -> list[Any]:
        """Let every process call a function, and return what all of them return, by rank.

        What it returns has to be data that JSON has. An error of one is an error of all.
        """
        if self.count == 1:
            return [answer()]
        error: Exception | None = None
        try:
            said = {"answer": answer()}
        except Exception as raised:
            error, said = raised, {"error": f"{type(raised).__name__}: {raised}"}
        heard = [parse_json(text) for text in _all_texts(json.dumps(said).encode(), self.count)]
        if error is not None:
            raise error
        for rank, one in enumerate(heard):
            if "error" in one:
                raise PlanError(
                    f"rank {rank} of {self.count} cannot plan its step, so none does:\n{one['error']}"
                )
        return [one["answer"] for one in heard]


def _all_texts(own: bytes, count: int) -> list[bytes]:
    """Send bytes to all processes, and return those of all, by rank."""
    # NCCL sends what is on a GPU, gloo and MPI what is on the host.
    place = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    length = torch.tensor([len(own)], dtype=torch.int64, device=place)
    lengths = [torch.zeros_like(length) for _ in range(count)]
    dist.all_gather(lengths, length)
    longest = max(int(one) for one in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=place)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(place)
    parts = [torch.empty_like(padded) for _ in range(count)]
    dist.all_gather(parts, padded)
    return [bytes(part[: int(size)].cpu().numpy()) for part, size in zip(parts, lengths)]
