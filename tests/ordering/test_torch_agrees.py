"""Timelines and heuristics against torch's own functions on the same graphs."""

from __future__ import annotations

from typing import Any

import pytest
from torch._inductor import memory

from order_graphs.shapes import SHAPES
from order_graphs.torch_side import torch_graph
from trainfit.ordering.heuristics import breadth_first, depth_first, least_peak_first, visit_order_of
from trainfit.ordering.order_timeline import order_timeline
from trainfit.ordering.ordering_problem import peak_of, problem_of

CASES = [(shape, seed, count) for shape in SHAPES for seed, count in enumerate((9, 12, 40, 40, 150, 400))]


@pytest.mark.parametrize(("shape", "seed", "count"), CASES)
def test_both_estimates_are_those_of_torch(shape: str, seed: int, count: int) -> None:
    graph = SHAPES[shape](seed, count)
    theirs = torch_graph(graph)
    for method in ("baseline", "lpmf", "bfs", "dfs"):
        order = theirs.order(method)
        ours = order_timeline(graph, [node.name for node in order])
        peak, live = memory.estimate_peak_memory(order, theirs.inputs, theirs.outputs)  # type: ignore[arg-type]
        assert (ours.peak_bytes, list(ours.live_bytes)) == (peak, live)
        peak, both, per_node, last_users = memory.estimate_peak_memory_allocfree(
            order,
            theirs.inputs,
            theirs.outputs,  # type: ignore[arg-type]
        )
        assert (ours.peak_bytes, list(zip(ours.after_alloc, ours.after_free))) == (peak, both)
        assert list(ours.allocated_and_freed) == [
            (per_node[node].size_alloc, per_node[node].size_free)
            for node in order  # type: ignore[index]
        ]
        last_user = {life.buffer: life.last_user for life in ours.lifetimes if life.end is not None}
        assert last_user == {buffer.get_name(): node.get_name() for buffer, node in last_users.items()}
        assert ours.peak_bytes == peak_of(problem_of(graph), ours.order)


@pytest.mark.parametrize(("shape", "seed", "count"), CASES)
def test_heuristics_give_the_orders_of_torch(shape: str, seed: int, count: int) -> None:
    graph = SHAPES[shape](seed, count)
    theirs = torch_graph(graph)
    problem = problem_of(graph)
    orders = {
        "lpmf": least_peak_first(problem, graph.output_bytes),
        "bfs": breadth_first(problem),
        "dfs": depth_first(problem, visit_order_of(graph, problem)),
    }
    for method, order in orders.items():
        assert [graph.nodes[n].name for n in order] == [node.name for node in theirs.order(method)], method


@pytest.mark.parametrize("shape", SHAPES)
def test_peaks_of_ranges_are_those_of_torch(shape: str) -> None:
    graph = SHAPES[shape](8, 60)
    theirs: Any = torch_graph(graph)
    ours = order_timeline(graph)
    step_of = {node: step for step, node in enumerate(theirs.nodes)}
    for first, last in ((0, 0), (0, 59), (10, 20), (37, 38), (50, 50)):
        last = min(last, len(graph.nodes) - 1)
        before = ours.after_free[first - 1] if first else ours.initial_bytes
        expected = memory.estimate_region_peak_memory(
            theirs.nodes[first : last + 1],
            region_start=first,
            region_end=last,
            step_of=step_of.__getitem__,
            graph_outputs=theirs.outputs,
            cur_memory=before,
        )
        assert max(before, *ours.after_alloc[first : last + 1]) == expected
