"""What is found out once for each kind of parameter is what torch finds out for every one of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import trainfit
from trainfit import Cluster, Step
from trainfit.capturing.distributed import shared_strategies


class Layer(nn.Module):
    def __init__(self, width: int, inside: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inside), nn.Linear(inside, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


def build(mesh: DeviceMesh, device: str = "cpu") -> Step:
    """Parameters of several kinds, some of them many times, which an optimizer takes in one list."""
    # Nine columns are not divided evenly: ranks have other rows of them than of the others.
    model = nn.Sequential(Layer(16, 32), Layer(16, 32), Layer(16, 48), nn.Linear(16, 9)).to(device)
    if "tp" in (mesh.mesh_dim_names or ()):
        for layer in list(model)[:2]:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
        mesh = mesh["fsdp"]
        for part in (model[2], model[3], model[0].norm, model[1].norm):
            for parameter in part.parameters():
                parameter.requires_grad_(False)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=True, amsgrad=True)
    inputs = torch.ones(4, 16, device=device)

    def run() -> Any:
        loss = model(inputs).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return Step(model=model, optimizer=optimizer, run=run)


@pytest.mark.parametrize("mesh", [(("fsdp", 4),), (("fsdp", 2), ("tp", 2))], ids=["fsdp", "fsdp-tp"])
def test_the_step_is_that_without_sharing(
    mesh: tuple[tuple[str, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(world_size=4, mesh=mesh)
    shared = trainfit.capture(build, device="h100", cluster=cluster)
    again = trainfit.capture(build, device="h100", cluster=cluster)
    monkeypatch.setattr(shared_strategies, "strategies_shared", nullcontext)
    alone = trainfit.capture(build, device="h100", cluster=cluster)
    assert any("_foreach_" in signature.name for signature in alone.signatures)
    assert shared == alone == again


def test_captures_share_the_shapes_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_strategies, "_known_results", {})
    for ranks in (2, 4, 8):
        trainfit.capture(build, device="h100", cluster=Cluster(world_size=ranks, mesh=(("fsdp", ranks),)))
        if ranks == 2:
            known = len(shared_strategies._known_results)
    assert 0 < known == len(shared_strategies._known_results)


def test_what_is_known_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_strategies, "_known_results", {})
    monkeypatch.setattr(shared_strategies, "_MOST_KNOWN", 5)
    trainfit.capture(build, device="h100", cluster=Cluster(world_size=4, mesh=(("fsdp", 4),)))
    assert 0 < len(shared_strategies._known_results) <= 5
