"""Forward and backward of a divided graph as kernels: what compiled code runs, returns and hands on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import GraphModule, Node

from trainfit.compiling.graph_planner import Backend
from trainfit.compiling.kernel_calls import KernelRun, kernel_run
from trainfit.compiling.kernel_memory import handed_on, kept_strides
from trainfit.compiling.node_calls import node_run
from trainfit.compiling.node_costs import hint
from trainfit.compiling.split_graphs import given_away, names_in_backward


@dataclass(frozen=True)
class GraphRun:
    """Forward and backward of one graph, as kernels."""

    forward: KernelRun
    backward: KernelRun
    returned: tuple[str, ...]
    """The buffers of forward that its caller gets."""
    saved: tuple[tuple[str, str], ...]
    """Buffers of forward that backward takes, each with what backward calls it."""
    tangents: tuple[tuple[int, int], ...] = ()
    """The gradients that backward is given: bytes, and the last kernel that reads each."""

    @property
    def gradients(self) -> tuple[str, ...]:
        """The buffers that backward returns."""
        return tuple(dict.fromkeys(name for name in self.backward.outputs if name is not None))


def graph_run(
    forward: GraphModule,
    backward: GraphModule,
    *,
    forward_outputs: int,
    backend: Backend,
    workspaces: dict[str, int] | None = None,
) -> GraphRun:
    """Return what a backend's code of a divided graph does."""
    names = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    donated = given_away(backward)
    taken = names_in_backward(forward, backward, forward_outputs)
    if backend == "inductor":
        first = kernel_run(forward, backward=False, workspaces=workspaces)
        sizes = {buffer.name: buffer.bytes for buffer in first.buffers}
        made = [name if name in sizes else None for name in first.outputs]
        # What is returned, too, is the caller's matter: `compiled_trace.py` knows how long it is there.
        given = [replace(storage, stays=False) for storage in handed_on(made, sizes, taken)]
        second = kernel_run(
            backward,
            backward=True,
            donated=donated,
            workspaces=workspaces,
            before=names,
            strides=kept_strides(forward, first.strides),
            given=[replace(storage, stays=False) for storage in given],
        )
    else:
        first = node_run(forward, workspaces=workspaces)
        donated += [node.name for node in _tangents(backward)]
        second = node_run(backward, donated=donated, workspaces=workspaces, before=names)
    own = {buffer.name for buffer in first.buffers}
    buffers = [name if name in own else None for name in first.outputs]
    returned = [name for name in buffers[:forward_outputs] if name is not None]
    saved = [
        (buffer, name)
        for buffer, name in zip(buffers[forward_outputs:], taken, strict=True)
        if buffer is not None and name
    ]
    tangents = [(_bytes(node), _last_read(second, node.name)) for node in _tangents(backward)]
    return GraphRun(first, second, tuple(dict.fromkeys(returned)), tuple(saved), tuple(tangents))


def _tangents(backward: GraphModule) -> list[Node]:
    found = backward.graph.find_nodes(op="placeholder")
    return [n for n in found if n.name.startswith("tangents") and isinstance(n.meta["val"], torch.Tensor)]


def _bytes(node: Node) -> int:
    value: torch.Tensor = node.meta["val"]
    return hint(value.numel()) * value.itemsize


def _last_read(run: KernelRun, name: str) -> int:
    """Return the last kernel for which an input has to be there."""
    known = [buffer.end for buffer in run.buffers if buffer.name == name and buffer.end is not None]
    return max([*known, *(place for place, call in enumerate(run.calls) if name in call.reads)], default=-1)
