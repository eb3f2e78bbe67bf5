"""Real processes that talk over gloo: each runs a function and hands back plain Python values."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `function(*arguments)` as each rank of a gloo group; return what the ranks return, in order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(  # type: ignore[no-untyped-call]
            _rank, (world_size, port, folder, function, arguments), nprocs=world_size, join=True
        )
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]


def _rank(rank: int, world_size: int, port: int, folder: str, function: Any, arguments: Any) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        Path(folder, str(rank)).write_bytes(pickle.dumps(function(*arguments)))
    finally:
        dist.destroy_process_group()
