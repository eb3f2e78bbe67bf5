"""A plan replayed over the steps of other ranks: its own promise again, or that of the rank, or a refusal."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import trainfit
from trainfit.capturing import capture
from trainfit.costs.pricing import price_trace
from trainfit.devices.device_table import find_device
from trainfit.errors import PlanDoesNotFit
from trainfit.planning.plan_replay import replay_plan
from trainfit.planning.planner import Planner
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace

WIDTH = 33


def build() -> trainfit.Step:
    """33 rows on two ranks: the first has one more, and so has its optimizer."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.GELU()) for _ in range(4)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batch, optimizer = torch.randn(64, WIDTH), torch.optim.AdamW(model.parameters())
    return trainfit.Step.of(model, batch, loss=lambda output: output.square().mean(), optimizer=optimizer)


@functools.cache
def of_rank(rank: int) -> Trace:
    return capture(build, cluster=Cluster(world_size=2, rank=rank))


@functools.cache
def plans() -> list[trainfit.Plan]:
    trace = of_rank(0)
    return Planner(trace, price_trace(trace, find_device("cpu"))).frontier(4)


def test_the_replay_of_a_plan_on_its_own_step_is_its_promise() -> None:
    assert len(plans()) >= 3
    for plan in plans():
        assert plan.cluster == Cluster(world_size=2, rank=0, own_mesh=(("dim0", 2),))
        timeline, peak_bytes = replay_plan(plan, of_rank(0))
        assert peak_bytes == plan.peak_bytes
        assert timeline.persistent_bytes == of_rank(0).persistent_bytes


def test_another_rank_has_a_peak_of_its_own() -> None:
    """Two moments of one row (33 weights and a bias) less, for each of four layers."""
    less = 2 * 4 * (WIDTH + 1) * 4
    for plan in plans():
        _, peak_bytes = replay_plan(plan, of_rank(1))
        assert plan.peak_bytes - peak_bytes == less


def test_a_step_without_the_regions_is_refused() -> None:
    def another() -> trainfit.Step:
        step = build()
        step.model[0][1] = nn.Tanh()
        return step

    def shorter() -> trainfit.Step:
        model = nn.Sequential()
        model.add_module("9", nn.Linear(WIDTH, WIDTH))
        return trainfit.Step.of(model, torch.randn(64, WIDTH), loss=lambda output: output.square().mean())

    smallest = plans()[0]
    with pytest.raises(PlanDoesNotFit, match=r"aten\.tanh\.default, and aten\.gelu\.default in the plan"):
        replay_plan(smallest, capture(another, cluster=Cluster(world_size=2, rank=0)))
    with pytest.raises(
        PlanDoesNotFit, match=r"it has a region Sequential\.\d.*, which this step does not call"
    ):
        replay_plan(smallest, capture(shorter))
