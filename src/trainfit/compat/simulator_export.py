"""The graph that inductor is about to order as JSON, in the schema of its simulator.

`trainfit order graph.json` reads it. Where inductor's structured logs go, `TORCH_TRACE` says.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypedDict, cast

from torch._functorch._aot_autograd.logging_utils import get_graph_being_compiled
from torch._inductor.memory import FreeableInputBuffer
from torch._logging import _internal as structured_log

from trainfit.compat.planning_info import graph_of_nodes
from trainfit.order_fronts.scheduler_graph import Nodes
from trainfit.ordering.simulator_json import graph_to_json

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode
    from torch.utils._ordered_set import OrderedSet


class ORMBuffer(TypedDict):
    """One buffer. `deps` are the buffers that its node reads, `unmet_deps` those of them that are no inputs.

    `size` is `size_free`, for readers that know one size only.
    """

    name: str
    size_alloc: int
    size_free: int
    size: int
    is_input: bool
    is_output: bool
    deps: list[str]
    unmet_deps: list[str]


class ORMNode(TypedDict):
    """One node and the buffers that it makes."""

    name: str
    buffer_names: list[str]


class ORMGraph(TypedDict):
    """The whole document."""

    nodes: list[ORMNode]
    buffers: list[ORMBuffer]


def simulator_graph(nodes: Nodes, inputs: Mapping[str, Any], outputs: Collection[str]) -> ORMGraph:
    """Return the document. `after`, which only trainfit reads, is what a node follows without reading it."""
    return cast(ORMGraph, graph_to_json(graph_of_nodes(nodes, inputs, outputs)))


def export_graph_for_simulator(
    nodes: list[BaseSchedulerNode],
    name_to_freeable_input_buf: dict[str, FreeableInputBuffer],
    name_to_fused_node: dict[str, BaseSchedulerNode],
    graph_inputs: OrderedSet[str],
    graph_outputs: OrderedSet[str],
) -> None:
    """Write the graph into inductor's structured log, as an artifact with the name of the compiled graph."""
    document = simulator_graph(nodes, name_to_freeable_input_buf, graph_outputs)
    name = PurePath(get_graph_being_compiled()).stem + "_fused"
    structured_log.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: json.dumps(document, indent=2),
    )
