"""Steps of several processes for tests of `verify`: one that is right, and some that go wrong."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import trainfit


def build(width: int = 33) -> trainfit.Step:
    """33 rows: the first rank has one more than the second."""
    dist.init_process_group("nccl")
    assert dist.get_backend() == "nccl"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(64, width)

    def run() -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model=model, optimizer=optimizer, run=run)


def joined(device: str = "cpu", width: int = 32) -> trainfit.Step:
    """Rank 1 has one batch more than rank 0, which waits for it in `join`."""
    dist.init_process_group("nccl")
    place = torch.device("cuda", dist.get_rank()) if device == "cuda" else torch.device("cpu")
    layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(place)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.ones(64, width, device=place) for _ in range(2 + dist.get_rank())]

    def run() -> torch.Tensor:
        with model.join():
            for batch in batches:
                loss: torch.Tensor = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return loss

    return trainfit.Step(model=model, optimizer=optimizer, run=run)


def fails_on_rank_1() -> trainfit.Step:
    """Only with others, so that the prediction goes through."""
    step = build()
    alone = dist.get_backend() == "fake" or "trainfit_silent" not in dist.Backend.backend_list
    if os.environ["RANK"] == "1" and not alone:
        raise ValueError("no data for this rank")
    return step
