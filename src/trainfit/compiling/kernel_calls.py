"""The kernels that inductor makes of a graph, in order, and the buffers that they make and read.

A fused kernel is priced by the bytes that it reads and writes; a kernel of torch's own, which compiled code
calls (products, convolutions, attention), as the operator that it is. A buffer lives as long as inductor's
code has it (`written_code.py`): of kernels that are one function, as long as the first to the last of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.dependencies import MemoryDep
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node

from trainfit.compiling.kernel_memory import Stride, lowered, output_strides
from trainfit.compiling.kernel_workspaces import called_node, inside_bytes
from trainfit.compiling.node_costs import signature_of_node
from trainfit.compiling.value_names import module_of
from trainfit.compiling.written_code import GivenStorage, runs_nothing, written_code
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
    given: Sequence[GivenStorage] = (),
) -> KernelRun:
    """Return the kernels of a graph; the arguments are those of `kernel_memory.kernel_peaks` and `lowered`.

    `before` are the nodes that forward has computed: in backward they run again; `given` is the memory that
    it hands to backward.
    """
    with lowered(module, backward=backward, donated=donated, strides=strides) as graph:
        return _KernelReader(graph, workspaces or {}, before, given).read()


class _KernelReader:
    """Reads what inductor's scheduler has made of one graph."""

    def __init__(
        self,
        graph: GraphLowering,
        workspaces: dict[str, int],
        before: Set[str],
        given: Sequence[GivenStorage],
    ) -> None:
        self._graph = graph
        self._ran = before
        self._nodes: list[Any] = graph.scheduler.nodes
        self._workspaces = workspaces
        self._code = written_code(graph, given)
        self._given = {storage.names[0]: storage.names for storage in given}
        self._owner = self._code.owner

    def read(self) -> KernelRun:
        calls = tuple(self._call(node) for node in self._nodes if not runs_nothing(node))
        outputs = tuple(self._output(result) for result in self._graph.graph_outputs)
        buffers = tuple(self._buffers()) if calls else ()
        return KernelRun(calls, buffers, outputs, tuple(output_strides(self._graph)))

    def _output(self, result: Any) -> str | None:
        if isinstance(result, ir.NoneAsConstantBuffer | ir.ShapeAsConstantBuffer):
            return None
        name = str(result.get_name())
        return self._owner.get(name, name)

    def _buffers(self) -> Iterator[KernelBuffer]:
        kernels = [call for node, call in zip(self._nodes, self._code.called_at) if not runs_nothing(node)]
        first: dict[int, int] = {-1: -1}
        last: dict[int, int] = {-1: 0}
        for number, call in enumerate(kernels):
            first.setdefault(call, number)
            last[call] = number
        for storage in self._code.storages:
            end = None if storage.end is None else last[storage.end]
            names = self._given[storage.name] if storage.start < 0 else (storage.name,)
            for number, name in enumerate(names):
                yield KernelBuffer(name, 0 if number else storage.bytes, first[storage.start], end)

    def _call(self, node: Any) -> KernelCall:
        own = {buffer.get_name() for buffer in node.get_outputs()}
        reads = {d.name: d for d in node.read_writes.reads if d.name not in own}
        written = [d for d in node.read_writes.writes if d.name in self._owner]
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
