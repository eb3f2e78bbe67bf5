"""A small model trained on real ranks: sharded the usual way, and as a file of `trainfit shard` says."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import trainfit
from trainfit.models.catalog import PRESETS, make_model

STEPS = 3


def trained(file: str | None) -> list[torch.Tensor]:
    """Return losses and weights of some steps; without a file each block is a unit and nothing is kept."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    torch.manual_seed(0)
    model = make_model(PRESETS["llama-tiny"].config)
    if file is None:
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        trainfit.shard(model, trainfit.load_sharding(file), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    tokens, found = torch.randint(0, 4096, (2, 32)), []
    for _ in range(STEPS):
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [*found, *(weight.detach() for weight in weights)]


def compared(files: list[str]) -> list[Any]:
    """Say of each file whether losses and weights are those of the usual way, to the bit."""
    assert os.environ["WORLD_SIZE"] == "2"
    usual = trained(None)
    return [all(map(torch.equal, usual, trained(file))) for file in files]
