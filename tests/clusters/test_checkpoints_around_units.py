"""A checkpoint around units of FSDP, and inside of them: what is gathered, and what that takes.

`benchmarks/cluster_truth.py` measures these steps on real ranks; here is what the figures mean.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "applying"))
sys.path.insert(0, str(Path(__file__).parent / "ranks"))
import small_steps
from plans import as_a_whole, plan_for

import trainfit
from trainfit.capturing import capture
from trainfit.errors import PlanDoesNotFit
from trainfit.operators.collectives import collective_kind
from trainfit.planning.model_calls import candidate_calls
from trainfit.planning.plan_replay import replay_plan
from trainfit.traces.ranks import Cluster
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Trace

TWO = Cluster(world_size=2, rank=0)
Arranged = Callable[[nn.ModuleList], list[nn.Module]]
"""Makes of the blocks of a transformer what it calls one after the other."""


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def nowhere(blocks: nn.ModuleList) -> list[nn.Module]:
    return [fully_shard(block) for block in blocks]


def inside(blocks: nn.ModuleList) -> list[nn.Module]:
    return [fully_shard(Checkpointed(block)) for block in blocks]


def around(blocks: nn.ModuleList) -> list[nn.Module]:
    return [Checkpointed(fully_shard(block)) for block in blocks]


def around_pairs(blocks: nn.ModuleList) -> list[nn.Module]:
    units = nowhere(blocks)
    return [Checkpointed(nn.Sequential(*units[:2])), Checkpointed(nn.Sequential(*units[2:]))]


def in_pairs(blocks: nn.ModuleList) -> list[nn.Module]:
    units = nowhere(blocks)
    return [nn.Sequential(*units[:2]), nn.Sequential(*units[2:])]


@functools.cache
def captured(arranged: Arranged) -> Trace:
    def build() -> trainfit.Step:
        small_steps._mesh(2, names=("dp",))
        model = small_steps.Transformer()
        model.layers = nn.ModuleList(arranged(model.layers))
        return small_steps.step_of(fully_shard(model))

    return capture(build, cluster=TWO)


def gathers(trace: Trace) -> int:
    return sum(collective_kind(trace.op_name(op)) == "all_gather" for op in range(len(trace.ops)))


def most_gathered_bytes(trace: Trace) -> int:
    """Return the most bytes that gathered parameters have in backward."""
    gathered = [number for number, storage in enumerate(trace.storages) if storage.gathered]
    ops = [number for number, op in enumerate(trace.ops) if op.phase == "backward"]
    return max(sum(trace.occupied_at(storage, op) for storage in gathered) for op in ops)


def test_around_one_unit_is_as_inside() -> None:
    """Backward has gathered the unit before its checkpoint is asked for anything."""
    assert gathers(captured(inside)) == gathers(captured(around)) == gathers(captured(nowhere))
    assert simulate(captured(inside)).peak_bytes == simulate(captured(around)).peak_bytes


def test_around_several_units_they_are_whole_at_once() -> None:
    """Recomputation gathers the first of two before its own backward, and does not let go of it."""
    assert gathers(captured(around_pairs)) == gathers(captured(nowhere))
    block = small_steps.Block()
    block_bytes = sum(parameter.numel() for parameter in block.parameters()) * 4
    less = most_gathered_bytes(captured(around_pairs)) - most_gathered_bytes(captured(around))
    assert less == block_bytes


def test_no_region_is_planned_around_units() -> None:
    trace = captured(in_pairs)
    names = {trace.module_name(trace.calls[call].module) for call in candidate_calls(trace)}
    assert "Transformer.layers.0.1" in names
    assert not names & {"Transformer", "Transformer.layers.0", "Transformer.layers.1"}


def test_a_plan_with_a_region_around_units_is_not_predicted() -> None:
    trace = captured(in_pairs)
    plan = replace(plan_for(trace, ["Transformer.layers.0"], as_a_whole), cluster=TWO)
    with pytest.raises(PlanDoesNotFit, match=r"Transformer\.layers\.0 is around FSDP units"):
        replay_plan(plan, trace)
