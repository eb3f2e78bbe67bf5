"""The kernels that inductor makes of a graph, in order, and the buffers that they make and read.

A fused kernel is priced by the bytes that it reads and writes; a kernel of torch's own, which compiled code
calls (products, convolutions, attention), as the operator that it is. A buffer lives as long as inductor's
code has it: kept for a later one of its kind, or written over, where that is what the code does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.dependencies import MemoryDep
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node

from trainfit.compiling.kernel_memory import Stride, lowered, output_strides
from trainfit.compiling.kernel_workspaces import called_node, inside_bytes
from trainfit.compiling.node_costs import signature_of_node
from trainfit.compiling.value_names import module_of
from trainfit.order_fronts.reuse import kept_for_later
from trainfit.order_fronts.scheduler_memory import kinds_of_buffers, planned_graph, precise_graph
from trainfit.ordering.order_timeline import Lifetime, order_timeline
from trainfit.traces import arguments
from trainfit.traces.trace import Signature, TensorSpec

_MOST_NAMED = 3
"""Of the operators that are fused into a kernel."""


@dataclass(frozen=True)
class KernelCall:
    """One kernel that compiled code runs."""

    signature: Signature
    module: str
    """Where what it computes was called, below the compiled module."""
    reads: tuple[str, ...]
    """The buffers and inputs that it reads."""
    again: bool = False
    """Whether all that it computes was computed in forward already."""


@dataclass(frozen=True)
class KernelBuffer:
    """Memory of a graph: made by a kernel, or given to it and freed by it."""

    name: str
    bytes: int
    start: int
    """The kernel with which it begins; -1 if it is given."""
    end: int | None
    """The kernel after which it is free; None if it is returned."""


@dataclass(frozen=True)
class KernelRun:
    """What compiled code of one graph does."""

    calls: tuple[KernelCall, ...]
    buffers: tuple[KernelBuffer, ...]
    outputs: tuple[str | None, ...]
    """For each result of the graph the buffer or input that it is; None for what is no tensor."""
    strides: tuple[Stride | None, ...] = ()
    """How they lie in memory, as far as that is known."""


def kernel_run(
    module: GraphModule,
    *,
    backward: bool,
    donated: Sequence[str] = (),
    workspaces: dict[str, int] | None = None,
    before: Set[str] = frozenset(),
    strides: Mapping[str, Stride] | None = None,
) -> KernelRun:
    """Return the kernels of a graph; the arguments are those of `kernel_memory.kernel_peaks` and `lowered`.

    `before` are the nodes that forward has computed: in backward they run again.
    """
    with lowered(module, backward=backward, donated=donated, strides=strides) as graph:
        return _Reader(graph, workspaces or {}, before).read()


class _Reader:
    """Reads what inductor's scheduler has made of one graph."""

    def __init__(self, graph: GraphLowering, workspaces: dict[str, int], before: Set[str]) -> None:
        self._graph = graph
        self._ran = before
        self._nodes: list[Any] = graph.scheduler.nodes
        self._workspaces = workspaces
        planned = planned_graph(self._nodes)
        precise = precise_graph(self._nodes, planned, in_this_order=True)
        steps = range(len(self._nodes))
        kinds = kinds_of_buffers(self._nodes, in_this_order=True)
        self._lives = order_timeline(precise, steps).lifetimes
        self._longer = {
            name: between.stop - 1
            for name, between, _ in kept_for_later(planned, precise, steps, *kinds)
            if between
        }
        self._written = {b.name for b in precise.buffers if b.size_free or b.size_alloc or b.alias_of}
        self._inputs = set(precise.inputs)
        self._owner = {b.name: precise.buffers[precise.root[n]].name for n, b in enumerate(precise.buffers)}
        """The buffer whose memory each buffer is: itself, or what it is written over."""
        self._count = 0
        self._before: list[int] = []
        """For each of the scheduler's nodes how many kernels run before it."""
        for node in self._nodes:
            self._before.append(self._count)
            self._count += not _is_nothing(node)

    def read(self) -> KernelRun:
        calls = tuple(self._call(node) for node in self._nodes if not _is_nothing(node))
        outputs = tuple(self._output(result) for result in self._graph.graph_outputs)
        buffers = tuple(self._buffers()) if calls else ()
        return KernelRun(calls, buffers, outputs, tuple(output_strides(self._graph)))

    def _output(self, result: Any) -> str | None:
        if isinstance(result, ir.NoneAsConstantBuffer | ir.ShapeAsConstantBuffer):
            return None
        name = str(result.get_name())
        return self._owner.get(name, name)

    def _buffers(self) -> Iterator[KernelBuffer]:
        makers = {b.get_name(): step for step, node in enumerate(self._nodes) for b in node.get_outputs()}
        for life in self._lives:
            if not life.size_free:
                continue  # the same memory as another, or none
            if life.buffer in self._inputs:
                yield KernelBuffer(life.buffer, life.size_free, -1, self._end(life))
                continue
            start = makers[life.buffer]
            if not life.size_alloc:
                # One of several results: all of them begin with the kernel that computes them.
                reads = [makers.get(d.name, start) for d in self._nodes[start].read_writes.reads]
                start = min([start, *reads])
            first = min(self._before[start], self._count - 1)
            end = self._end(life)
            yield KernelBuffer(life.buffer, life.size_free, first, None if end is None else max(end, first))

    def _end(self, life: Lifetime) -> int | None:
        """Return the last kernel that a buffer is there for."""
        if life.end is None:
            return None
        step = max(life.end, self._longer.get(life.buffer, 0))
        return max(self._before[step] - _is_nothing(self._nodes[step]), 0)

    def _call(self, node: Any) -> KernelCall:
        own = {buffer.get_name() for buffer in node.get_outputs()}
        reads = {d.name: d for d in node.read_writes.reads if d.name not in own}
        written = [d for d in node.read_writes.writes if d.name in self._written]
        origins = list(_origins(node))
        signature = _of_torch(node, origins)
        if signature is None:
            moved = _moved_bytes(reads.values(), written)
            signature = Signature(
                name=_fused_name(origins),
                inputs=_specs(reads),
                outputs=_specs(d.name for d in written),
                arguments=arguments.encode([], {}),
                view=False,
                in_place=False,
                random=False,
                moved_bytes=moved,
                work_source="formula",
            )
        inside = inside_bytes(node, self._workspaces)
        if inside:
            signature = replace(signature, workspace_bytes=inside, workspace_source="measured")
        again = bool(origins) and all(origin.name in self._ran for origin in origins)
        read = dict.fromkeys(self._owner.get(name, name) for name in reads)
        return KernelCall(signature, module_of(origins[-1]) if origins else "", tuple(read), again)


def _is_nothing(node: Any) -> bool:
    """Whether a scheduler's node runs no kernel: it takes one of several results, or only has memory."""
    if isinstance(node, NopKernelSchedulerNode):
        return True
    return all(isinstance(part.node, ir.MultiOutput) for part in node.get_nodes())


def _origins(node: Any) -> Iterator[Node]:
    """Yield the graph's nodes that a kernel computes, each once."""
    seen: set[Node] = set()
    for part in node.get_nodes():
        if part.node is None:
            continue
        for origin in part.node.get_origins():
            if origin not in seen and isinstance(origin.target, torch._ops.OpOverload):
                seen.add(origin)
                yield origin


def _of_torch(node: Any, origins: Sequence[Node]) -> Signature | None:
    """Return the call of one of torch's kernels; None if inductor writes the kernel itself."""
    for part in node.get_nodes():
        if not isinstance(part.node, ir.ExternKernel):
            continue
        found = called_node(part.node, iter(origins))
        if found is not None:
            return signature_of_node(found)
        if not isinstance(getattr(part.node, "op_overload", None), torch._ops.OpOverload):
            return None
    return None


def _fused_name(origins: Sequence[Node]) -> str:
    names = list(dict.fromkeys(str(origin.target).split(".")[1] for origin in origins))
    more = f"+{len(names) - _MOST_NAMED}" if len(names) > _MOST_NAMED else ""
    return f"inductor.{'+'.join(names[:_MOST_NAMED]) or 'kernel'}{more}.fused"


def _moved_bytes(reads: Iterable[Any], written: Sequence[Any]) -> int:
    """Return the bytes that a kernel reads and writes; of a table that it looks up, no more than it makes."""
    sizes = [V.graph.get_dep_size_hint(d) for d in written]
    most = max(sizes, default=0)
    for dependency in reads:
        size = V.graph.get_dep_size_hint(dependency)
        looks_up = isinstance(dependency, MemoryDep) and dependency.is_indirect()
        sizes.append(min(size, most) if looks_up else size)
    return sum(sizes)


def _specs(names: Iterable[str]) -> tuple[TensorSpec, ...]:
    """Return what tensors look like; a name that stands for several results of one call is none itself."""
    return tuple(_spec(name) for name in names if not _is_several(name))


def _is_several(name: str) -> bool:
    buffer = V.graph.try_get_buffer(name)
    return isinstance(getattr(buffer, "layout", None), ir.MultiOutputLayout)


def _spec(name: str) -> TensorSpec:
    count = int(V.graph.sizevars.optimization_hint(V.graph.get_numel(name), fallback=0))
    return TensorSpec(str(V.graph.get_dtype(name)).removeprefix("torch."), (count,), (1,))
