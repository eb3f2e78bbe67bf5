"""A graph that runs node by node, as `aot_eager` has it, in the form of kernels and their buffers."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from trainfit.compiling.kernel_calls import KernelBuffer, KernelCall, KernelRun
from trainfit.compiling.node_costs import signature_of_node
from trainfit.compiling.split_graphs import node_workspace
from trainfit.compiling.value_names import module_of
from trainfit.order_fronts.fx import buffer_graph
from trainfit.ordering.order_timeline import order_timeline
from trainfit.traces import arguments
from trainfit.traces.trace import Signature


def node_run(
    module: GraphModule,
    *,
    donated: Sequence[str] = (),
    workspaces: dict[str, int] | None = None,
    before: Set[str] = frozenset(),
) -> KernelRun:
    """Return every node of a graph as a call; the arguments are those of `kernel_calls.kernel_run`."""
    graph = buffer_graph(module, donated)
    called = {node.name: node for node in module.graph.nodes}
    owner = {b.name: graph.buffers[graph.root[n]].name for n, b in enumerate(graph.buffers)}
    calls = []
    for entry in graph.nodes:
        node = called[entry.name]
        signature = _signature(node, node_workspace(node, workspaces or {}))
        reads = tuple(dict.fromkeys(owner[name] for name in entry.reads))
        calls.append(KernelCall(signature, module_of(node), reads, entry.name in before))
    given = set(graph.inputs)
    buffers = [
        KernelBuffer(life.buffer, life.size_free, -1 if life.buffer in given else life.start, life.end)
        for life in order_timeline(graph, range(len(graph.nodes))).lifetimes
        if life.size_free
    ]
    results = tree_leaves(next(node for node in module.graph.nodes if node.op == "output").args)
    outputs = [owner.get(leaf.name) if isinstance(leaf, Node) else None for leaf in results]
    return KernelRun(tuple(calls), tuple(buffers), tuple(outputs))


def _signature(node: Node, inside: int) -> Signature:
    found = signature_of_node(node)
    if found is None:
        # Python's own: sizes, and taking one of several results.
        return Signature(str(node.target), (), (), arguments.encode([], {}), True, False, False)
    if not inside:
        return found
    return replace(found, workspace_bytes=inside, workspace_source="measured")
