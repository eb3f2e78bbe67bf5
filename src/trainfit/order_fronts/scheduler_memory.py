"""What the kernels of inductor's scheduler allocate: as inductor counts it when it plans, and more precisely.

Inductor counts every buffer of a node as allocated. When it writes the code it leaves out those that only
their own fused kernel uses, and lets a kernel write its result over an input of the same size that no later
kernel reads. Both can be known before an order is chosen where they hold in every order; `precise_graph`
takes them into account. Which of the other inputs are overwritten depends on the order and is left out. What
code that is written really has alive is read off it (`compiling/written_code.py`).
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

from torch._inductor import config, ir
from torch._inductor.codegen.common import BackendFeature
from torch._inductor.codegen.wrapper import buffer_reuse_key, can_match_buffer_size
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from trainfit.operators.families import PLAIN_PRODUCTS
from trainfit.order_fronts.scheduler_graph import Nodes, freeable_inputs, graph_of_uses, made_buffers
from trainfit.ordering.graph import Buffer, BufferGraph


def planned_graph(nodes: Nodes) -> BufferGraph:
    """Return what inductor is about to order, as inductor counts it; only while it compiles a graph."""
    scheduler: Any = V.graph.scheduler
    made = made_buffers(nodes, scheduler.name_to_buf)
    inputs = freeable_inputs(nodes, V.graph.graph_inputs)
    return graph_of_uses(nodes, made, inputs, set(V.graph.get_output_names()))


def precise_graph(nodes: Nodes, planned: BufferGraph) -> BufferGraph:
    """Return the same graph without what is never allocated and with what is overwritten in every order."""
    removed = set(_removed(nodes))
    owner: dict[str, str] = {}
    taken: set[str] = set()
    size = {buffer.name: buffer for buffer in planned.buffers}
    for result, overwritten in _overwritten(nodes):
        if overwritten not in size or {result, overwritten} & removed or overwritten in taken:
            continue
        before, after = size[overwritten], size[result]
        if not before.output and before.size_alloc == before.size_free == after.size_alloc == after.size_free:
            owner[result] = overwritten
            taken.add(overwritten)
    buffers = []
    for buffer in planned.buffers:
        if buffer.name in removed or buffer.name in owner:
            buffer = replace(buffer, size_alloc=0, size_free=0, alias_of=owner.get(buffer.name))
        buffers.append(buffer)
    return BufferGraph(planned.nodes, tuple(buffers), planned.inputs)


def kinds_of_buffers(nodes: Nodes) -> tuple[dict[str, Hashable], dict[str, Hashable]]:
    """Return the kinds of the buffers that the code allocates, and of those that later ones may take over."""
    allocated: dict[str, Hashable] = {}
    released: dict[str, Hashable] = {}
    for node in nodes:
        for buffer in node.get_outputs():
            if isinstance(buffer.node.get_output_spec(), ir.NoneLayout | ir.MultiOutputLayout):
                continue
            kind = buffer_reuse_key(buffer.node)
            released[buffer.get_name()] = kind
            if buffer.node.should_allocate():
                allocated[buffer.get_name()] = kind
    return allocated, released


def nodes_with_unknown_workspace(nodes: Nodes) -> list[int]:
    """Return the positions of the nodes that call kernels which may allocate more than their results.

    Kernels that inductor writes itself do not, and neither do matrix products.
    """
    found = []
    for number, node in enumerate(nodes):
        for part in node.get_nodes():
            kernel = getattr(part.node, "python_kernel_name", None) or ""
            calls = isinstance(part.node, ir.ExternKernel) and not isinstance(part.node, ir.MultiOutput)
            if calls and not _is_matrix_product(kernel):
                found.append(number)
                break
    return found


def _is_matrix_product(kernel: str) -> bool:
    """Whether a kernel such as `extern_kernels.mm` or `torch.ops.aten.mm.default` is a plain product."""
    called = re.match(r"(?:extern_kernels|torch\.ops\.aten|aten)\.([^.]*)", kernel)
    return called is not None and called[1] in {*PLAIN_PRODUCTS, "_mm_plus_mm"}


def with_workspaces(graph: BufferGraph, workspaces: dict[int, int]) -> BufferGraph:
    """Return the graph with extra bytes in use while some of its nodes run: bytes by node."""
    nodes, added = list(graph.nodes), []
    for number, size in workspaces.items():
        name = f"{nodes[number].name}:workspace"
        nodes[number] = replace(nodes[number], buffers=(*nodes[number].buffers, name))
        added.append(Buffer(name, size, size))
    return BufferGraph(tuple(nodes), (*graph.buffers, *added), graph.inputs)


def _removed(nodes: Nodes) -> Iterator[str]:
    """Yield the buffers that live within one fused kernel only."""
    scheduler: Any = V.graph.scheduler
    outputs = set(V.graph.get_output_names())
    for node in nodes:
        inside = OrderedSet(part.get_name() for part in node.get_nodes())
        if not all(isinstance(part, SchedulerNode) for part in node.get_nodes()):
            continue
        for buffer in node.get_outputs():
            name = buffer.get_name()
            if name not in outputs and scheduler.can_buffer_be_removed_through_fusion(name, inside):
                yield name


def _overwritten(nodes: Nodes) -> Iterator[tuple[str, str]]:
    """Yield results of kernels, each with an input that it may overwrite: its other readers run before."""
    scheduler: Any = V.graph.scheduler
    for node in nodes if config.inplace_buffers else ():
        device = node.get_device()
        if device is None or not V.graph.has_feature(device, BackendFeature.INPLACE_BUFFERS):
            continue
        for part in node.get_nodes():
            if not isinstance(part, SchedulerNode):
                continue
            for result in part.get_outputs():
                for read in part.read_writes.reads:
                    known = scheduler.name_to_donated_buffer.get(read.name)
                    source = known or scheduler.name_to_buf.get(read.name)
                    if source is not None and _may_overwrite(node, part, source, result):
                        yield result.get_name(), read.name


def _may_overwrite(node: Any, part: Any, source: Any, result: Any) -> bool:
    if not result.node.should_allocate() or result.node.get_mutation_names() or source.node is None:
        return False
    if isinstance(
        source.node.get_output_spec(),
        ir.NoneLayout | ir.MultiOutputLayout | ir.MutationLayoutSHOULDREMOVE | ir.CommBufferLayout,
    ):
        return False
    if source.get_name() in V.graph.never_reuse_buffers or source.get_name() in V.graph.constants:
        return False
    later = [user for user in source.users if user.node.get_name() not in part.ancestors]
    if len(later) != 1 or later[0].node is not part or not later[0].can_inplace:
        return False
    accesses = {
        access
        for inner in node.get_nodes()
        for access in inner.read_writes.reads_and_writes()
        if access.name == source.get_name()
    }
    return len(accesses) == 1 and bool(can_match_buffer_size(source.node, result.node))
