"""A checkpoint around units of FSDP, and inside of them: what is gathered, and what that takes.

`benchmarks/cluster_truth.py` measures these steps on real ranks; here is what the figures mean.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "applying"))
sys.path.insert(0, str(Path(__file__).parent / "ranks"))
import small_steps
from plans import as_a_whole, plan_for

import trainfit
from trainfit.allocator.step_columns import columns_of
from trainfit.capturing import capture
from trainfit.costs.roofline import roofline_costs
from trainfit.devices.device_table import find_device
from trainfit.devices.library_handles import library_workspaces
from trainfit.errors import PlanDoesNotFit
from trainfit.operators.collectives import collective_kind
from trainfit.planning import master
from trainfit.planning.effects import effect_of
from trainfit.planning.full_recompute import full_recompute
from trainfit.planning.master import MasterProblem
from trainfit.planning.model_calls import block_families, candidate_calls
from trainfit.planning.plan_replay import replay_plan
from trainfit.planning.planned_columns import PlannedColumns
from trainfit.planning.planner import Planner
from trainfit.planning.regions import RegionGraph, region_graph
from trainfit.planning.rewrite import rewritten
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


# What is replayed of a region around units, and what torch does with a checkpoint there ------------------


class Stage(nn.Module):
    """Blocks one after the other; with a checkpoint around all of them, or without."""

    def __init__(self, blocks: Iterable[nn.Module], checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._run, x, use_reentrant=False) if self.checkpointed else self._run(x)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Around(nn.Module):
    """Two blocks, what is computed between them, and a layer after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = small_steps.Block(), small_steps.Block()
        self.last = nn.Linear(small_steps.WIDTH, small_steps.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(self.second(torch.relu(self.first(x)))))


Arrange = Callable[[bool], nn.Module]
"""Makes a sharded model of stages, with checkpoints around them or without."""


def _model(stages: Iterable[nn.Module], mesh: DeviceMesh, *, frozen: bool = False) -> nn.Module:
    model = small_steps.Transformer()
    model.tokens.requires_grad_(not frozen)
    model.layers = nn.ModuleList(stages)
    return fully_shard(model, mesh=mesh)


def _staged(
    checkpointed: bool,
    shape: tuple[int, ...] = (2,),
    prepare: Callable[[list[Any]], None] = lambda blocks: None,
    **options: Any,
) -> nn.Module:
    mesh = small_steps._mesh(*shape, names=("replicate", "shard")[-len(shape) :])
    blocks = [fully_shard(small_steps.Block(), mesh=mesh, **options) for _ in range(5)]
    model = _model([Stage(blocks[:3], checkpointed), Stage(blocks[3:], checkpointed)], mesh)
    prepare(blocks)
    return model


def _gathered_ahead(blocks: list[Any], *, by: int) -> None:
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + by])


def _gathered_ahead_in_backward(blocks: list[Any]) -> None:
    for number, block in enumerate(blocks):
        block.set_modules_to_backward_prefetch(blocks[max(number - 2, 0) : number][::-1])


def units_in_units(checkpointed: bool) -> nn.Module:
    mesh = small_steps._mesh(2, names=("dp",))
    parts = [Around() for _ in range(4)]
    for part in parts:
        for module in (part.first, part.second, part):
            fully_shard(module, mesh=mesh)
    return _model([Stage(parts[:2], checkpointed), Stage(parts[2:], checkpointed)], mesh)


def more_than_units(checkpointed: bool) -> nn.Module:
    """Autograd comes to a layer of the root's before it comes to a unit: that is not gathered yet."""
    mesh = small_steps._mesh(2, names=("dp",))
    parts = [Around() for _ in range(2)]
    for part in parts:
        fully_shard(part.first, mesh=mesh)
        fully_shard(part.second, mesh=mesh)
    return _model([Stage([part], checkpointed) for part in parts], mesh)


def called_twice(checkpointed: bool) -> nn.Module:
    mesh = small_steps._mesh(2, names=("dp",))
    blocks = [fully_shard(small_steps.Block(), mesh=mesh) for _ in range(2)]
    return _model([Stage([block, block], checkpointed) for block in blocks], mesh)


def one_unit_of_two(checkpointed: bool) -> nn.Module:
    mesh = small_steps._mesh(2, names=("dp",))
    pairs = [[small_steps.Block(), small_steps.Block()] for _ in range(2)]
    for pair in pairs:
        fully_shard(pair, mesh=mesh)
    return _model([Stage(pair, checkpointed) for pair in pairs], mesh)


def one_without_backward(checkpointed: bool) -> nn.Module:
    mesh = small_steps._mesh(2, names=("dp",))
    blocks = [small_steps.Block() for _ in range(4)]
    blocks[0].requires_grad_(False)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    return _model([Stage(blocks[:2], checkpointed), Stage(blocks[2:], checkpointed)], mesh, frozen=True)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
ARRANGED: dict[str, Arrange] = {
    "let go of after forward": _staged,
    "kept after forward": functools.partial(_staged, reshard_after_forward=False),
    "in smaller groups after forward": functools.partial(_staged, shape=(4,), reshard_after_forward=2),
    "in bfloat16": functools.partial(_staged, mp_policy=MIXED),
    "on the host": functools.partial(_staged, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "replicated": functools.partial(_staged, shape=(2, 2)),
    "gathered ahead": functools.partial(_staged, prepare=functools.partial(_gathered_ahead, by=1)),
    "gathered ahead in backward": functools.partial(_staged, prepare=_gathered_ahead_in_backward),
    "among one": functools.partial(_staged, shape=(1,)),
    "accumulated": _staged,
    "units in units": units_in_units,
    "more than units": more_than_units,
}
NOT_KNOWN: dict[str, Arrange] = {
    "gathered two ahead": functools.partial(_staged, prepare=functools.partial(_gathered_ahead, by=2)),
    "called twice": called_twice,
    "one unit of two": one_unit_of_two,
    "one without backward": one_without_backward,
}


@functools.cache
def arranged(name: str, checkpointed: bool) -> Trace:
    arrange = (ARRANGED | NOT_KNOWN)[name]
    ranks = {"in smaller groups after forward": 4, "replicated": 4, "among one": 1}.get(name, 2)
    step_of = accumulating if name == "accumulated" else small_steps.step_of
    return capture(lambda: step_of(arrange(checkpointed)), cluster=Cluster(world_size=ranks, rank=0))


def accumulating(model: Any) -> trainfit.Step:
    """Two passes, of which the first reduces nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(0, 32, (4, 8))

    def run() -> torch.Tensor:
        for last, part in zip((False, True), tokens.chunk(2)):
            model.set_requires_gradient_sync(last)
            loss = functional.cross_entropy(model(part).flatten(0, 1), part.flatten()) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return trainfit.Step(model=model, optimizer=optimizer, run=run)


def around_stages(trace: Trace) -> list[RegionGraph | None]:
    calls = [n for n, call in enumerate(trace.calls) if trace.modules[call.module].class_name == "Stage"]
    assert len(calls) in (2, 4)
    return [region_graph(trace, call, [0.0] * len(trace.ops)) for call in calls]


def recomputed(trace: Trace) -> Trace:
    """Return what the replay makes of a step with both stages recomputed as a whole."""
    regions = [region for region in around_stages(trace) if region is not None]
    assert len(regions) == len(around_stages(trace))
    return rewritten(trace, [effect_of(trace, r, full_recompute(r), by_torch=True) for r in regions])


def course(trace: Trace) -> list[tuple[str, int]]:
    """Return what is allocated while each op runs, without views, which torch's hooks make more of."""
    live = simulate(trace).live_bytes
    rows = [(trace.signatures[op.signature], size) for op, size in zip(trace.ops, live)]
    return [(s.name, size) for s, size in rows if not s.view and s.name != "torch.get_rng_state"]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("name", ARRANGED)
def test_the_replay_is_what_torch_does_op_by_op(name: str) -> None:
    """The step with torch's own checkpoints was captured: all of its ops, with all that is alive."""
    replayed = recomputed(arranged(name, checkpointed=False))
    replayed.check()
    assert course(replayed) == course(arranged(name, checkpointed=True))


def test_units_gather_when_their_region_is_recomputed() -> None:
    """Of three units, autograd has come to the last, which began to gather the one before it."""
    trace = arranged("let go of after forward", checkpointed=False)
    region = around_stages(trace)[0]
    assert region is not None
    kinds = [
        (trace.module_name(trace.ops[op].module)[-1], trace.ops[op].exchange) for _, op in region.gathers.ops
    ]
    assert list(dict.fromkeys(kinds)) == [("0", "gather"), ("0", "fill"), ("1", "fill")]
    kept = arranged("kept after forward", checkpointed=False)
    assert all(region is not None and not region.gathers.ops for region in around_stages(kept))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("name", NOT_KNOWN)
def test_what_is_not_known_of_torch_is_not_replayed(name: str) -> None:
    trace = arranged(name, checkpointed=False)
    assert around_stages(trace)[0] is None
    plan = replace(plan_for(trace, ["Transformer.layers.0"], as_a_whole), cluster=TWO)
    with pytest.raises(PlanDoesNotFit, match=r"Transformer\.layers\.0 is around FSDP units, and what they"):
        replay_plan(plan, trace)


def test_regions_are_planned_around_units_and_inside() -> None:
    trace = captured(in_pairs)
    names = {trace.module_name(trace.calls[call].module) for call in candidate_calls(trace)}
    assert names >= {"Transformer.layers.0.1", "Transformer", "Transformer.layers.0"}
    # What is called a block, and compared with, is a unit.
    blocks = {
        trace.module_name(trace.calls[call].module) for calls in block_families(trace) for call in calls
    }
    assert "Transformer.layers.0.1" in blocks and "Transformer.layers.0" not in blocks


def test_what_is_promised_of_a_region_around_units_is_what_is_replayed() -> None:
    """Memory is also worked out without writing the trace: as a program of budgets, and as columns."""
    own = find_device("h100")
    trace = _on_gpu()
    planner = Planner(trace, roofline_costs(trace, own))
    around = [o for o in planner.problem.options if o.effects[0].region.gathers.ops]
    stages = [o for o in around if o.effects[0].region.module != trace.model]
    assert len(stages) > 10
    columns = PlannedColumns(trace, own)
    for option in stages[::4]:
        new = rewritten(trace, option.effects)
        alone = master.build(simulate(trace), [option], [[0]])
        assert _modelled_peak(alone) == simulate(new).peak_bytes
        expected, found = columns_of(new, library_workspaces(new, own)), columns.of(option.effects)
        assert expected is not None and found is not None
        assert list(found.sequence(2).sizes) == list(expected.sequence(2).sizes)
        assert list(found.sequence(2).kinds) == list(expected.sequence(2).kinds)


def _on_gpu() -> Trace:
    def build() -> trainfit.Step:
        mesh = init_device_mesh("cuda", (2,))
        blocks = [fully_shard(small_steps.Block().cuda(), mesh=mesh) for _ in range(5)]
        stages = [Stage(blocks[:3], False), Stage(blocks[3:], False)]
        model = small_steps.Transformer()
        model.layers = nn.ModuleList(stages)
        return small_steps.step_of(fully_shard(model.cuda(), mesh=mesh), "cuda")

    return capture(build, device="cuda", cluster=TWO)


def _modelled_peak(problem: MasterProblem) -> int:
    """Return the peak that a problem sees if the only option is chosen."""
    carried = most = 0
    for peak, covering, entering in zip(problem.peak, problem.covering, problem.entering):
        carried += entering.get(0, 0)
        most = max(most, covering.get(0, peak) + carried)
    return most
