"""What planning knows about buffers and nodes of inductor's scheduler, under torch's names.

Inductor keeps it as `mpi_buffer` of a buffer and `mpi_node` of a node. These records and that of an input are
torch's own classes: inductor makes some of them itself and asks for their type. They are filled in from
`order_fronts/scheduler_graph.py`, and `graph_of_nodes` turns them into the graph that everything else here is
computed from, whoever filled them in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from torch._inductor.memory import (
    FreeableInputBuffer,
    MemoryPlanningInfoForBuffer,
    MemoryPlanningInfoForNode,
)
from torch.utils._ordered_set import OrderedSet

from trainfit.errors import GraphError
from trainfit.order_fronts.scheduler_graph import (
    BufferUse,
    Nodes,
    buffer_sizes,
    freeable_inputs,
    graph_of_uses,
    links_of,
    made_buffers,
)
from trainfit.ordering.graph import BufferGraph

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode, SchedulerBuffer


class PlanningError(GraphError, RuntimeError):
    """Scheduler nodes that cannot be planned. Where torch refuses them too, it raises a `RuntimeError`."""


@dataclass
class PeakMemoryResult:
    """One order of the nodes, its peak in bytes and what found it."""

    order: list[BaseSchedulerNode]
    peak_memory: int
    method: str


class NodeInfo(TypedDict, total=False):
    """What torch's sorts keep about a node while they run. The sorts here keep it in `ordering`."""

    indegree: int
    memory_to_free: int
    order: int


def get_freeable_input_buf(
    nodes: list[BaseSchedulerNode],
    graph_inputs: OrderedSet[str],
) -> dict[str, FreeableInputBuffer]:
    """Return those of the graph's inputs that nodes read and that may be released, by name."""
    found = freeable_inputs(nodes, graph_inputs)
    return {name: FreeableInputBuffer(name, _info(use)) for name, use in found.items()}


def compute_size_for_scheduler_buffer(
    name_to_buf: dict[str, SchedulerBuffer],
) -> dict[str, tuple[int, int]]:
    """Return the bytes that each buffer adds when it is made and releases when it is freed."""
    return buffer_sizes(name_to_buf)


def assign_memory_planning_info_for_scheduler_buffers(
    nodes: list[BaseSchedulerNode],
    name_to_buf: dict[str, SchedulerBuffer],
) -> None:
    """Set `mpi_buffer` of every buffer: its sizes, and the nodes that come after it."""
    buffers: dict[str, Any] = dict(name_to_buf)
    for name, use in made_buffers(nodes, name_to_buf).items():
        buffers[name].mpi_buffer = _info(use)


def assign_memory_planning_info_for_scheduler_nodes(
    nodes: list[BaseSchedulerNode],
    name_to_fused_node: dict[str, BaseSchedulerNode],
    name_to_buf: dict[str, SchedulerBuffer],
    name_to_freeable_input_buf: dict[str, FreeableInputBuffer],
) -> None:
    """Set `mpi_node` of every node, out of the `mpi_buffer` of what it makes and reads."""
    made = _buffers_by_name(nodes)
    everything = {**made, **name_to_freeable_input_buf}
    scheduled: Nodes = list(nodes)
    try:
        links = links_of(scheduled, _uses(made), _uses(name_to_freeable_input_buf))
    except GraphError as error:
        raise PlanningError(str(error)) from None
    for index, node in enumerate(scheduled):
        node.mpi_node = MemoryPlanningInfoForNode(
            index=index,
            size=sum(buffer.mpi_buffer.size_alloc for buffer in node.get_outputs()),
            pred_buffers=OrderedSet(everything[name] for name in links[node].reads),
            pred_nodes=OrderedSet(links[node].before),
            succ_nodes=OrderedSet(links[node].after),
        )


def graph_of_nodes(
    nodes: Nodes, inputs: Mapping[str, Any], outputs: Collection[str] = (), *, as_linked: bool = False
) -> BufferGraph:
    """Return the graph of nodes whose buffers have their `mpi_buffer`; inputs are freeable input buffers.

    With `as_linked`, a node also comes after the `pred_nodes` of its `mpi_node`, as in torch's sorts.
    """
    try:
        graph = graph_of_uses(nodes, _uses(_buffers_by_name(nodes)), _uses(inputs), outputs)
        return _linked(graph, nodes) if as_linked else graph
    except GraphError as error:
        raise PlanningError(str(error)) from None


def _linked(graph: BufferGraph, nodes: Nodes) -> BufferGraph:
    """Return the graph with the links of its nodes that no buffer explains; mostly there are none."""
    linked = list(graph.nodes)
    for number, node in enumerate(nodes):
        known = {graph.nodes[before].name for before in graph.predecessors[number]}
        named = dict.fromkeys(before.get_name() for before in node.mpi_node.pred_nodes)
        missing = tuple(name for name in named if name not in known)
        if missing:
            linked[number] = replace(linked[number], after=linked[number].after + missing)
    return graph if linked == list(graph.nodes) else BufferGraph(tuple(linked), graph.buffers, graph.inputs)


def _buffers_by_name(nodes: Collection[Any]) -> dict[str, Any]:
    return {buffer.get_name(): buffer for node in nodes for buffer in node.get_outputs()}


def _uses(buffers: Mapping[str, Any]) -> dict[str, BufferUse]:
    found = {}
    for name, buffer in buffers.items():
        info = buffer.mpi_buffer
        followers = dict.fromkeys((*info.succ_nodes_for_ordering, *info.succ_nodes))
        found[name] = BufferUse(info.size_alloc, info.size_free, tuple(info.succ_nodes), tuple(followers))
    return found


def _info(use: BufferUse) -> MemoryPlanningInfoForBuffer:
    return MemoryPlanningInfoForBuffer(
        use.size_alloc, use.size_free, OrderedSet(use.readers), OrderedSet(use.followers)
    )
