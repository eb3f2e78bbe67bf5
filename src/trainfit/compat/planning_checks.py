"""What planning refuses before it looks for an order: cycles, and names that mean several buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._inductor.memory import FreeableInputBuffer

from trainfit.compat.planning_info import PlanningError
from trainfit.errors import GraphError
from trainfit.ordering.graph import BufferGraph, Node

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode, SchedulerBuffer


def validate_graph_acyclic(nodes: list[BaseSchedulerNode]) -> None:
    """Refuse nodes that wait for each other by the `pred_nodes` of their `mpi_node`; the error names them."""
    linked = []
    for node in nodes:
        before = tuple(dict.fromkeys(other.get_name() for other in node.mpi_node.pred_nodes))
        if node.get_name() in before:
            raise PlanningError(f"node {node.get_name()!r} waits for itself.")
        linked.append(Node(node.get_name(), (), (), before))
    try:
        BufferGraph(tuple(linked), ())
    except GraphError as error:
        raise PlanningError(str(error)) from None


def validate_unique_buffer_names(
    nodes: list[BaseSchedulerNode],
    name_to_buf: dict[str, SchedulerBuffer],
    name_to_freeable_input_buf: dict[str, FreeableInputBuffer],
) -> None:
    """Refuse a buffer that `name_to_buf` does not have under its name, or that is called like an input."""
    for node in nodes:
        for buffer in node.get_outputs():
            name = buffer.get_name()
            made = f"buffer {name!r} of node {node.get_name()!r}"
            if name not in name_to_buf:
                raise PlanningError(f"{made} is not found in name_to_buf.")
            # By identity: buffers that look alike are still two, and comparing them compares whole graphs.
            if name_to_buf[name] is not buffer:
                raise PlanningError(
                    f"{made} is not the one that name_to_buf has ({_maker(name_to_buf[name])}): "
                    "two buffers share the same name."
                )
            if name in name_to_freeable_input_buf:
                raise PlanningError(f"{made} is called like an input of the graph.")


def _maker(buffer: Any) -> str:
    defining = getattr(buffer, "defining_op", None)
    return "made by no node" if defining is None else f"made by {defining.get_name()!r}"
