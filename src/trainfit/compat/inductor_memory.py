"""`torch._inductor.memory` under its own names, on trainfit's graphs, timelines and search.

    from trainfit.compat import inductor_memory as memory

Functions take inductor's scheduler nodes and return what torch's return, in the same units.
`reorder_for_peak_memory` also searches, so that its order is never worse than torch's best of four.

    inductor_memory.install()           # everything that is compiled from now on runs in our order
    with inductor_memory.installed():   # or: everything that is compiled in here
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch._inductor import config
from torch._inductor.memory import (
    FreeableInputBuffer,
    MemoryPlanningInfoForBuffer,
    MemoryPlanningInfoForNode,
)

from trainfit.compat.planning_checks import validate_graph_acyclic, validate_unique_buffer_names
from trainfit.compat.planning_info import (
    NodeInfo,
    PeakMemoryResult,
    PlanningError,
    assign_memory_planning_info_for_scheduler_buffers,
    assign_memory_planning_info_for_scheduler_nodes,
    compute_size_for_scheduler_buffer,
    get_freeable_input_buf,
    graph_of_nodes,
)
from trainfit.compat.scheduler_peaks import (
    BufferInfo,
    SNodeMemory,
    compute_memory_timeline,
    estimate_peak_memory,
    estimate_peak_memory_allocfree,
    estimate_region_peak_memory,
    live_memory_before_steps_from_buf_info_list,
    peak_memory_from_buf_info_list,
    timeline_of,
)
from trainfit.compat.scheduler_sorts import (
    topological_sort_bfs,
    topological_sort_dfs,
    topological_sort_lpmf,
    topological_sort_search,
)
from trainfit.compat.simulator_export import (
    ORMBuffer,
    ORMGraph,
    ORMNode,
    export_graph_for_simulator,
)
from trainfit.order_fronts.inductor import install, installed, uninstall

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._inductor.scheduler import BaseSchedulerNode, SchedulerBuffer
    from torch.utils._ordered_set import OrderedSet

__all__ = [
    "BufferInfo",
    "FreeableInputBuffer",
    "MemoryPlanningInfoForBuffer",
    "MemoryPlanningInfoForNode",
    "NodeInfo",
    "ORMBuffer",
    "ORMGraph",
    "ORMNode",
    "PeakMemoryResult",
    "PlanningError",
    "SNodeMemory",
    "assign_memory_planning_info_for_scheduler_buffers",
    "assign_memory_planning_info_for_scheduler_nodes",
    "compute_memory_timeline",
    "compute_size_for_scheduler_buffer",
    "estimate_peak_memory",
    "estimate_peak_memory_allocfree",
    "estimate_region_peak_memory",
    "export_graph_for_simulator",
    "get_freeable_input_buf",
    "install",
    "installed",
    "live_memory_before_steps_from_buf_info_list",
    "peak_memory_from_buf_info_list",
    "prepare_planning_info",
    "reorder_for_peak_memory",
    "topological_sort_bfs",
    "topological_sort_dfs",
    "topological_sort_lpmf",
    "topological_sort_search",
    "uninstall",
    "validate_graph_acyclic",
    "validate_unique_buffer_names",
]

_LOG = logging.getLogger(__name__)
_KNOW_THE_GRAPH = {topological_sort_lpmf.__name__, topological_sort_search.__name__}
"""Methods that are given inputs, buffers and outputs besides the nodes; by name, so that torch's is too."""


def prepare_planning_info(
    nodes: list[BaseSchedulerNode],
    name_to_buf: dict[str, SchedulerBuffer],
    name_to_fused_node: dict[str, BaseSchedulerNode],
    graph_inputs: OrderedSet[str],
    graph_outputs: OrderedSet[str],
) -> tuple[int, dict[str, FreeableInputBuffer]]:
    """Assign the planning information; return the peak of the nodes in their order, and freeable inputs."""
    inputs = _assign(nodes, name_to_buf, name_to_fused_node, graph_inputs)
    return estimate_peak_memory(nodes, inputs, graph_outputs)[0], inputs


def reorder_for_peak_memory(
    nodes: list[BaseSchedulerNode],
    name_to_buf: dict[str, SchedulerBuffer],
    name_to_fused_node: dict[str, BaseSchedulerNode],
    graph_inputs: OrderedSet[str],
    graph_outputs: OrderedSet[str],
    methods: list[Callable[..., list[BaseSchedulerNode]]] = [  # noqa: B006
        topological_sort_lpmf,
        topological_sort_bfs,
        topological_sort_dfs,
        topological_sort_search,
    ],
) -> list[BaseSchedulerNode]:
    """Return the nodes in the order of the smallest peak: as they are, or what one of the methods returns.

    Of equal peaks the first wins, so that our search changes nothing that it does not improve.
    """
    inputs = _assign(nodes, name_to_buf, name_to_fused_node, graph_inputs)
    validate_unique_buffer_names(nodes, name_to_buf, inputs)
    if config.reorder_for_peak_memory_debug:
        export_graph_for_simulator(nodes, inputs, name_to_fused_node, graph_inputs, graph_outputs)
    # One graph for all orders, since estimating each by itself would build it again; it refuses cycles.
    graph = graph_of_nodes(nodes, inputs, graph_outputs)
    step = {node: number for number, node in enumerate(nodes)}
    found = [PeakMemoryResult(nodes, timeline_of(graph, range(len(nodes))).peak_bytes, "baseline")]
    for method in methods:
        name = getattr(method, "__name__", repr(method))
        more = (inputs, name_to_buf, graph_outputs) if name in _KNOW_THE_GRAPH else ()
        order = method(nodes, *more)
        if len(order) != len(nodes) or set(order) != set(nodes):
            raise PlanningError(f"{name} has to return each of the {len(nodes)} nodes once.")
        peak = timeline_of(graph, [step[node] for node in order]).peak_bytes
        found.append(PeakMemoryResult(order, peak, name))
    _LOG.info("peaks of %d nodes: %s", len(nodes), {result.method: result.peak_memory for result in found})
    return min(found, key=lambda result: result.peak_memory).order


def _assign(
    nodes: list[BaseSchedulerNode],
    name_to_buf: dict[str, Any],
    name_to_fused_node: dict[str, BaseSchedulerNode],
    graph_inputs: OrderedSet[str],
) -> dict[str, FreeableInputBuffer]:
    inputs = get_freeable_input_buf(nodes, graph_inputs)
    assign_memory_planning_info_for_scheduler_buffers(nodes, name_to_buf)
    assign_memory_planning_info_for_scheduler_nodes(nodes, name_to_fused_node, name_to_buf, inputs)
    return inputs
