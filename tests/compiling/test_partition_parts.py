"""Parts of the search for partitions against dumber ones: memory step by step, all subsets, torch."""

from __future__ import annotations

import copy
import itertools
import random
import warnings
from typing import Any

import pytest
import torch
from test_partitions import Builder, all_partitions, chain, random_problem
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import partitioners
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import trainfit
from trainfit.compiling.graph_planner import GraphPlanner
from trainfit.compiling.node_costs import NodeCosts
from trainfit.compiling.partition_cuts import CrossingValues, PartitionCuts
from trainfit.compiling.partition_memory import PartitionMemory, needed_again, partition_of
from trainfit.compiling.recompute_problem import Fusing, GraphLimits, RecomputeProblem, Role
from trainfit.devices.device_table import find_device


def stepwise_backward_peak(problem: RecomputeProblem, order: tuple[int, ...], kept: tuple[int, ...]) -> int:
    """Go through backward with a set of storages: nothing is fused, every node makes one storage."""
    nodes, sizes = problem.nodes, problem.sizes
    given = {s for n in kept for s in nodes[n].storages} - problem.input_storages
    given |= {s for node in nodes if node.role is Role.TANGENT for s in node.storages}
    given |= problem.output_storages
    staying = {s for n in problem.backward_outputs for s in nodes[n].storages} | problem.output_storages
    staying |= {s for node in nodes if node.role is Role.TANGENT for s in node.storages}
    alive, most = set(given), sum(sizes[s] for s in given)
    for place, number in enumerate(order):
        alive |= set(nodes[number].makes)
        most = max(most, sum(sizes[s] for s in alive))
        needed = {s for later in order[place + 1 :] for r in nodes[later].reads for s in nodes[r].storages}
        touched = {s for r in (*nodes[number].reads, number) for s in nodes[r].storages}
        alive -= {s for s in touched if s not in needed and s not in staying}
    return most


@pytest.mark.parametrize("seed", range(25))
def test_memory_is_that_of_going_step_by_step(seed: int) -> None:
    problem = random_problem(seed)
    memory = PartitionMemory(problem)
    draw = random.Random(seed)
    for _ in range(10):
        chosen = [n for n in problem.useful if draw.random() < 0.5]
        found = memory.partition(chosen)
        if found is None:
            assert needed_again(problem, set(chosen)) is None
            continue
        assert sorted(found.backward_order) == sorted({*problem.backward_nodes, *found.repeated})
        ran = set(found.kept)
        for number in found.backward_order:
            reads = [r for r in problem.nodes[number].reads if problem.nodes[r].role is not Role.INPUT]
            assert all(r in ran or problem.nodes[r].role is Role.TANGENT for r in reads)
            ran.add(number)
        assert found.backward_peak_bytes == stepwise_backward_peak(problem, found.backward_order, found.kept)


def test_all_results_of_a_node_that_runs_again_are_made_anew() -> None:
    b = Builder()
    x = b.add(Role.INPUT, 100)
    several = b.add(Role.FORWARD, 0, x, seconds=1.0)
    b.sizes += [100, 40]
    nodes = b.nodes
    made = (len(b.sizes) - 2, len(b.sizes) - 1)
    node = nodes[several]
    nodes[several] = type(node)(node.name, node.role, node.reads, made, made, 1.0, keepable=False)
    for storage in made:
        name = f"n{len(nodes)}"
        nodes.append(type(node)(name, Role.FORWARD, (several,), (storage,), picks=True, fusing=Fusing.VIEW))
    first, second = several + 1, several + 2
    loss = b.add(Role.FORWARD, 4, first)
    tangent = b.add(Role.TANGENT, 4)
    gradient = b.add(Role.BACKWARD, 100, tangent, first, second)
    partition = partition_of(b.problem([loss], [gradient]), (first,))
    assert partition is not None and partition.repeated == (several, second)
    # The first result is kept, and there once more while both are made: 100, 100 + 40, loss and its gradient.
    assert partition.backward_peak_bytes == 100 + 140 + 4 + 4


@pytest.mark.parametrize("seed", range(25))
def test_cuts_are_the_cheapest_of_all_subsets(seed: int) -> None:
    problem = random_problem(seed)
    every = all_partitions(problem)
    cuts = PartitionCuts(problem, 1.0)
    draw = random.Random(seed)
    given = frozenset(n for n in problem.useful if draw.random() < 0.2)
    # From the highest to the lowest price and back: each goes on from what is known.
    for price in (1.0, 0.001, 0.1, 0.01, 0.03, 10.0):
        chosen = cuts.cheapest(price, given)
        if not every:
            assert chosen is None or partition_of(problem, chosen | given) is None
            continue
        assert chosen is not None

        def cost(kept: Any, repeated: Any, price: float = price) -> float:
            paid = sum(problem.own_bytes[n] for n in kept if n not in given) * price
            return paid + sum(problem.nodes[n].seconds for n in repeated)

        found = needed_again(problem, chosen | given)
        assert found is not None
        free = [needed_again(problem, {*p.kept, *given}) for p in every]
        least = min(cost(*choice) for choice in free if choice is not None)
        assert cost(*found) == pytest.approx(least, abs=1e-9)


def test_nodes_that_may_run_once_are_not_run_again() -> None:
    problem = chain(6)
    cuts = PartitionCuts(problem, 1.0)
    for number in range(1, 7):
        chosen = cuts.cheapest(1e3, frozenset(), frozenset((number,)))
        assert chosen is not None
        found = needed_again(problem, chosen)
        assert found is not None and number not in found[1] and len(found[0]) == 1


def test_what_crosses_is_what_is_read_behind_a_place() -> None:
    for seed in range(20):
        problem = random_problem(seed)
        values = CrossingValues(problem)
        for places in itertools.combinations(problem.useful, 2):
            expected = {
                read
                for place in places
                for number in problem.useful
                for read in problem.nodes[number].reads
                if read < place <= number and read in problem.useful
            }
            assert values.at(places) == expected


class Shared(nn.Module):
    """Two passes through the same checkpointed layers, which share the views of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in "abc"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses = []
        for y in (x, x.flip(0)):
            for layer in self.layers:
                y = y + checkpoint(layer, y, use_reentrant=False)
            losses.append(y.square().mean())
        return torch.stack(losses).sum()


def test_checkpoints_that_share_weights_are_planned() -> None:
    torch._dynamo.reset()
    model = Shared()
    compiled = trainfit.compile(model, budget=1, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings(), pytest.raises(trainfit.BudgetTooSmall):
        warnings.filterwarnings("error", message="torch's own partitioner")
        compiled(torch.randn(32, 16))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # of copying a graph, torch's own
def test_never_worse_than_what_torch_keeps() -> None:
    planners: list[GraphPlanner] = []

    def divide(module: Any, inputs: Any, **kwargs: Any) -> Any:
        outputs = kwargs["num_fwd_outputs"]
        costs = NodeCosts(find_device("cpu"))
        mine = copy.deepcopy(module)
        planners.append(GraphPlanner(mine, forward_outputs=outputs, costs=costs, backend="aot_eager"))
        return min_cut_rematerialization_partition(module, inputs, **kwargs)

    torch._dynamo.reset()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(4)))
    backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=divide)
    torch.compile(model, backend=backend)(torch.randn(64, 32)).sum().backward()
    torch._dynamo.reset()
    for fraction in (1.0, 0.7, 0.3, 0.0):
        theirs = partition_of(planners[0].problem, planners[0].torch_choice(fraction))
        assert theirs is not None
        ours = planners[0].search.fastest(GraphLimits.same(theirs.peak_bytes))
        assert ours is not None and ours.peak_bytes <= theirs.peak_bytes
        assert ours.seconds <= theirs.seconds + 1e-12


def test_torchs_partitioner_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("the cut is unbounded")

    monkeypatch.setattr(partitioners, "choose_saved_values_set", fails)
    torch._dynamo.reset()
    compiled = trainfit.compile(nn.Linear(4, 4), budget="1GiB", backend="aot_eager", fullgraph=True)
    compiled(torch.ones(2, 4)).sum().backward()
    assert not any(graph.refused for graph in compiled.compile_plan.graphs)
    torch._dynamo.reset()
