"""torch's own scheduling functions, run on a `BufferGraph`.

Stand-ins with the few attributes that `torch._inductor.memory` asks for take the place of scheduler nodes and
buffers; everything else is torch's code. Sizes on allocation and release come from the graph: torch reads
them off layouts that a graph without torch does not have. Anything with the same functions can take the place
of torch's module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor import memory
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from trainfit.ordering.graph import BufferGraph, Node

METHODS = ("baseline", "lpmf", "bfs", "dfs")


class StandInBuffer:
    """What torch asks of a scheduler buffer; its bytes are elements of one byte each."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.users: list[Any] = []
        self.node = SimpleNamespace(layout=None, get_numel=lambda: size, get_dtype=lambda: torch.uint8)
        self.mpi_buffer = memory.MemoryPlanningInfoForBuffer()

    def get_name(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)


class StandInNode:
    """What torch asks of a scheduler node."""

    def __init__(self, name: str, outputs: list[StandInBuffer], reads: Any, unmet: Any) -> None:
        self.name = name
        self.outputs = outputs
        self.read_writes = SimpleNamespace(reads=reads)
        self.unmet_dependencies = unmet
        self.mpi_node = memory.MemoryPlanningInfoForNode()

    def get_name(self) -> str:
        return self.name

    def get_outputs(self) -> list[StandInBuffer]:
        return self.outputs

    def get_buffer_names(self) -> OrderedSet[str]:
        return OrderedSet(buffer.name for buffer in self.outputs)


@dataclasses.dataclass
class TorchGraph:
    """A graph in torch's own data structures, ready for torch's functions."""

    nodes: list[StandInNode]
    buffers: dict[str, StandInBuffer]
    inputs: dict[str, memory.FreeableInputBuffer]
    outputs: OrderedSet[str]
    planner: Any = memory
    """Whose functions: torch's module, or another with the same names."""

    def order(self, method: str) -> list[StandInNode]:
        """Return the order of one of torch's methods."""
        match method:
            case "baseline":
                return self.nodes
            case "lpmf":
                return self.planner.topological_sort_lpmf(self.nodes, self.inputs, self.buffers, self.outputs)
            case "bfs":
                return self.planner.topological_sort_bfs(self.nodes)
            case "dfs":
                with _deep_recursion(len(self.nodes)):
                    return self.planner.topological_sort_dfs(self.nodes)
            case _:
                raise ValueError(f"torch has no method {method!r}")

    def peak(self, order: list[StandInNode]) -> int:
        """Return torch's estimate of an order's peak."""
        return self.planner.estimate_peak_memory(order, self.inputs, self.outputs)[0]

    def peaks(self) -> dict[str, int]:
        """Return the peak of every method."""
        return {method: self.peak(self.order(method)) for method in METHODS}

    def seconds(self) -> dict[str, float]:
        """Return how long every method and the estimate of its peak take."""
        found = {}
        for method in METHODS:
            begin = time.perf_counter()
            self.peak(self.order(method))
            found[method] = time.perf_counter() - begin
        return found


def torch_graph(graph: BufferGraph, planner: Any = memory) -> TorchGraph:
    """Return the graph in torch's data structures, with planning information filled in by `planner`."""
    buffers = {
        buffer.name: StandInBuffer(buffer.name, buffer.size_free)
        for number, buffer in enumerate(graph.buffers)
        if graph.producer[number] >= 0
    }
    for node in graph.nodes:
        if not node.buffers:  # torch orders by buffers, so that every node needs one
            buffers[_nothing_of(node)] = StandInBuffer(_nothing_of(node), 0)
    nodes = [_node(graph, number, buffers) for number in graph.baseline]
    renamed = {
        buffer.name: graph.buffers[graph.root[number]].name
        for number, buffer in enumerate(graph.buffers)
        if buffer.alias_of is not None
    }
    outputs = OrderedSet(b.name for number, b in enumerate(graph.buffers) if graph.kept[number])
    size_of = {buffer.name: buffer for buffer in graph.buffers}
    handler: Any = SimpleNamespace(
        name=None,
        get_dep_size_hint=lambda dep: size_of[dep.name].size_free,
        sizevars=SimpleNamespace(optimization_hint=lambda value, fallback: value),
        scheduler=SimpleNamespace(mutation_real_name=renamed),
    )
    stand_ins: Any = nodes
    with V.set_graph_handler(handler):
        inputs = planner.get_freeable_input_buf(stand_ins, OrderedSet(graph.inputs))
        planner.assign_memory_planning_info_for_scheduler_buffers(stand_ins, buffers)
    for name in size_of.keys() & buffers.keys():
        buffers[name].mpi_buffer.size_alloc = size_of[name].size_alloc
        buffers[name].mpi_buffer.size_free = size_of[name].size_free
    planner.assign_memory_planning_info_for_scheduler_nodes(stand_ins, {}, buffers, inputs)
    return TorchGraph(nodes, buffers, inputs, outputs, planner)


def _node(graph: BufferGraph, number: int, buffers: dict[str, StandInBuffer]) -> StandInNode:
    node = graph.nodes[number]
    names = [graph.buffers[read].name for read in graph.reads[number]]
    reads = OrderedSet(StarDep(name) for name in names)
    unmet = OrderedSet(StarDep(name) for name in node.reads if name in buffers)
    for other in node.after:
        earlier = graph.nodes[graph.node_number[other]]
        first = (*earlier.buffers, _nothing_of(earlier))[0]
        if StarDep(first) not in unmet:
            unmet.add(WeakDep(first, mutating_buf="", is_fake=True))
    made = node.buffers or (_nothing_of(node),)
    return StandInNode(node.name, [buffers[name] for name in made], reads, unmet)


def _nothing_of(node: Node) -> str:
    return f"{node.name}:nothing"


@contextlib.contextmanager
def _deep_recursion(depth: int) -> Iterator[None]:
    """torch's depth first calls itself once per node of a path."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 10 * depth + 1000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
