"""Orders of inductor's scheduler nodes, under torch's names, and the one that trainfit's search finds.

Torch's three are the same orders as torch's, because `ordering/heuristics.py` has the same rules; ties go to
the node that came first when the planning information was assigned. Nodes that wait for each other, or for a
node that is not there, are an error, where torch's sorts leave nodes out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch._inductor.memory import FreeableInputBuffer

from trainfit.compat.planning_info import graph_of_nodes
from trainfit.order_fronts.scheduler_graph import Nodes
from trainfit.ordering.best_order import best_order
from trainfit.ordering.heuristics import breadth_first, depth_first, least_peak_first, visit_order_of
from trainfit.ordering.ordering_problem import problem_of

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode, SchedulerBuffer
    from torch.utils._ordered_set import OrderedSet


def topological_sort_lpmf(
    nodes: list[BaseSchedulerNode],
    name_to_freeable_input_buf: dict[str, FreeableInputBuffer],
    name_to_buf: dict[str, SchedulerBuffer],
    graph_outputs: OrderedSet[str],
) -> list[BaseSchedulerNode]:
    """Run what does not raise the peak, least growth first; if nothing is like that, the smallest rise."""
    first = _by_index(nodes)
    graph = graph_of_nodes(first, name_to_freeable_input_buf, graph_outputs, as_linked=True)
    return [first[number] for number in least_peak_first(problem_of(graph), graph.output_bytes)]


def topological_sort_bfs(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """Run the node whose predecessors ran earliest."""
    first = _by_index(nodes)
    graph = graph_of_nodes(first, {}, as_linked=True)
    return [first[number] for number in breadth_first(problem_of(graph))]


def topological_sort_dfs(nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
    """Run each node right after what it needs; nodes that touch fewer bytes are visited first."""
    first = _by_index(nodes)
    graph = graph_of_nodes(first, _inputs_read(first), as_linked=True)
    problem = problem_of(graph)
    maker = {name: number for number, node in enumerate(first) for name in node.get_buffer_names()}
    named = []
    for number, node in enumerate(first):
        makers = {maker[dep.name] for dep in node.unmet_dependencies if dep.name in maker}
        named.append(tuple(sorted(makers - {number})))
    # By the names that the nodes themselves use: renamed buffers lead to the node that renamed them.
    visits = replace(visit_order_of(graph, problem), named_predecessors=named)
    return [first[number] for number in depth_first(problem, visits)]


def topological_sort_search(
    nodes: list[BaseSchedulerNode],
    name_to_freeable_input_buf: dict[str, FreeableInputBuffer],
    name_to_buf: dict[str, SchedulerBuffer],
    graph_outputs: OrderedSet[str],
) -> list[BaseSchedulerNode]:
    """Run the nodes in the best order that trainfit finds, as docs/order.md says; torch has no such sort."""
    first = _by_index(nodes)
    graph = graph_of_nodes(first, name_to_freeable_input_buf, graph_outputs, as_linked=True)
    return [first[number] for number in best_order(graph).steps]


def _by_index(nodes: Nodes) -> Nodes:
    return sorted(nodes, key=lambda node: int(node.mpi_node.index))


def _inputs_read(nodes: Nodes) -> dict[str, Any]:
    """Return the inputs among the buffers that nodes read: those that none of them makes."""
    made = {buffer.get_name() for node in nodes for buffer in node.get_outputs()}
    read = (buffer for node in nodes for buffer in node.mpi_node.pred_buffers)
    return {buffer.get_name(): buffer for buffer in read if buffer.get_name() not in made}
