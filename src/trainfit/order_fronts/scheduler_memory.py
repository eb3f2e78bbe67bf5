"""What the kernels of inductor's scheduler allocate: as inductor counts it when it plans, and more precisely.

Inductor counts every buffer of a node as allocated. When it writes the code it leaves out those that only
their own fused kernel uses, and lets a kernel write its result over an input of the same size that no later
kernel reads. Both can be known before an order is chosen where they hold in every order; `precise_graph`
takes them into account. Which of the other inputs are overwritten depends on the order and is left out.

What is joined (`torch.cat`) is one buffer into whose parts kernels write: the code allocates it before the
first of them runs, and its parts have no memory of their own. Which is first depends on the order, too.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Set
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


def precise_graph(nodes: Nodes, planned: BufferGraph, *, in_this_order: bool = False) -> BufferGraph:
    """Return the same graph without what is never allocated and with what is overwritten in every order.

    If the nodes will run `in_this_order`, also with what is overwritten in this one, and with the parts of
    joined buffers as one.
    """
    removed = set(_removed(nodes))
    owner: dict[str, str] = {}
    taken: set[str] = set()
    size = {buffer.name: buffer for buffer in planned.buffers}
    for result, overwritten in _overwritten(nodes, in_this_order):
        if overwritten not in size or {result, overwritten} & removed or overwritten in taken:
            continue
        before, after = size[overwritten], size[result]
        if not before.output and before.size_alloc == before.size_free == after.size_alloc == after.size_free:
            owner[result] = overwritten
            taken.add(overwritten)
    whole: dict[str, str] = {}
    for joined, parts in (_joined(nodes) if in_this_order else {}).items():
        if joined in size and not removed & {joined, *parts}:
            first, *others = parts
            whole[first] = joined
            owner |= dict.fromkeys((joined, *others), first)
    buffers = []
    for buffer in planned.buffers:
        if buffer.name in whole:
            known = size[whole[buffer.name]]
            buffer = replace(buffer, size_alloc=known.size_alloc, size_free=known.size_free)
        elif buffer.name in removed or buffer.name in owner:
            buffer = replace(buffer, size_alloc=0, size_free=0, alias_of=owner.get(buffer.name))
        buffers.append(buffer)
    return BufferGraph(planned.nodes, tuple(buffers), planned.inputs)


def kinds_of_buffers(
    nodes: Nodes, *, in_this_order: bool = False
) -> tuple[dict[str, Hashable], dict[str, Hashable]]:
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
    for joined, parts in (_joined(nodes) if in_this_order else {}).items():
        if joined in released:
            allocated[parts[0]] = released[parts[0]] = released[joined]
            for name in (joined, *parts[1:]):
                released.pop(name, None)
                allocated.pop(name, None)
    return allocated, released


def _joined(nodes: Nodes) -> dict[str, list[str]]:
    """Return the buffers that others are parts of, each with its parts as they are written."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        for buffer in node.get_outputs():
            part = whole = buffer.node
            while isinstance(whole.get_output_spec(), ir.NonOwningLayout):
                whole = whole.get_output_spec().view.unwrap_view()
                while isinstance(whole, ir.BaseView | ir.MutableBox):
                    whole = whole.data
            if whole is not part:
                found.setdefault(whole.get_name(), []).append(part.get_name())
    return found


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


def kernel_names(node: Any) -> Iterator[tuple[str, str]]:
    """Yield what a node calls as kernels of their own: the FX node and the operator (`aten.mm.default`)."""
    for part in node.get_nodes():
        called = getattr(part.node, "op_overload", None)
        if called is not None and isinstance(part.node, ir.ExternKernel):
            origin = part.node.get_origin_node()
            yield "" if origin is None else origin.name, str(called)


def _overwritten(nodes: Nodes, in_this_order: bool) -> Iterator[tuple[str, str]]:
    """Yield results of kernels, each with an input that it may overwrite: its other readers run before."""
    scheduler: Any = V.graph.scheduler
    done: set[str] = set()
    for node in nodes if config.inplace_buffers else ():
        before = frozenset(done)
        if in_this_order:
            done |= {part.get_name() for part in node.get_nodes()}
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
                    if source is not None and _may_overwrite(node, part, source, result, before):
                        yield result.get_name(), read.name


def _may_overwrite(node: Any, part: Any, source: Any, result: Any, done: Set[str]) -> bool:
    if not result.node.should_allocate() or result.node.get_mutation_names() or source.node is None:
        return False
    if isinstance(
        source.node.get_output_spec(),
        ir.NoneLayout | ir.MultiOutputLayout | ir.MutationLayoutSHOULDREMOVE | ir.CommBufferLayout,
    ):
        return False
    if source.get_name() in V.graph.never_reuse_buffers or source.get_name() in V.graph.constants:
        return False
    later = [user for user in source.users if user.node.get_name() not in part.ancestors | done]
    if len(later) != 1 or later[0].node is not part or not later[0].can_inplace:
        return False
    accesses = {
        access
        for inner in node.get_nodes()
        for access in inner.read_writes.reads_and_writes()
        if access.name == source.get_name()
    }
    return len(accesses) == 1 and bool(can_match_buffer_size(source.node, result.node))
