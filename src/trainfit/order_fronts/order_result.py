"""From whatever has a graph to the best order of it: a graph or its file, an FX module, a trace, a target."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainfit.basics.doing import doing
from trainfit.basics.in_notebooks import ShownInNotebooks
from trainfit.order_fronts.eager import trace_graph
from trainfit.ordering.best_order import best_order
from trainfit.ordering.found_order import Order
from trainfit.ordering.graph import BufferGraph
from trainfit.ordering.simulator_json import load_graph
from trainfit.traces.trace import Trace

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from trainfit.targets import Target


@dataclass(frozen=True)
class GraphToOrder:
    """A graph, and where it came from."""

    target: str
    source: str
    """`file`, `graph`, `joint` (forward and backward as one graph) or `eager` (the captured step)."""
    graph: BufferGraph
    torch: str | None = None
    device: str | None = None
    released_at_last_use: BufferGraph | None = None
    """The same step if every tensor were freed after its last use."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class OrderResult(ShownInNotebooks):
    """An order with where its graph came from. All bytes are predicted."""

    given: GraphToOrder
    order: Order
    released_at_last_use: Order | None = None
    """For an eager step: the best order if every tensor were also freed after its last use."""
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    """Wall time of each stage: `capture` (or reading the file), `solve`, `total`."""


def has_graph(given: Any) -> bool:
    """Return whether what was given is a graph or has one; a step has to be traced first."""
    return isinstance(given, BufferGraph | Trace) or is_graph_file(given) or _is_fx_module(given)


def is_graph_file(given: Any) -> bool:
    """Return whether what was given is the path of a graph: it ends in `.json`, and is no `hf:` config."""
    if isinstance(given, Path):
        return True
    return isinstance(given, str) and given.endswith(".json") and not given.startswith("hf:")


def _is_fx_module(given: Any) -> bool:
    """Whether it is a `GraphModule`, without loading torch: whoever has one has loaded it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.fx.GraphModule)


def graph_to_order(given: Any) -> GraphToOrder:
    """Return the graph of whatever `has_graph`, or the joint graph of a `Target`."""
    if isinstance(given, BufferGraph):
        return GraphToOrder("graph", "graph", given)
    if isinstance(given, Trace):
        freed = trace_graph(given, as_held=False)
        graph = trace_graph(given)
        return GraphToOrder(given.target, "eager", graph, given.torch, given.device, freed, given.warnings)
    if is_graph_file(given):
        doing("reading the graph")
        return GraphToOrder(str(given), "file", load_graph(given))
    return _traced(given)


def order_graph(given: GraphToOrder, *, seconds: float | None = None) -> OrderResult:
    """Find the order with the smallest peak; `seconds` is explained in `trainfit.ordering.best_order`."""
    doing("looking for the best order")
    order = best_order(given.graph, seconds=seconds)
    freed = given.released_at_last_use
    return OrderResult(given, order, best_order(freed, seconds=seconds) if freed is not None else None)


def _traced(given: GraphModule | Target) -> GraphToOrder:
    """Return the graph of an FX module, or the joint graph of a target."""
    import torch

    from trainfit.order_fronts.fx import buffer_graph

    if isinstance(given, torch.fx.GraphModule):
        return GraphToOrder("GraphModule", "graph", buffer_graph(given), torch.__version__, "cpu")
    from trainfit.order_fronts.joint import joint_graph_without_memory

    doing("tracing the step")
    module = joint_graph_without_memory(given.build)
    return GraphToOrder(given.name, "joint", buffer_graph(module), torch.__version__, "cpu")
