"""What torch's kernels need inside where inductor's code calls them: as the tensors lie that it gives them.

Inductor lays images out with their channels last, whatever the graph says. A convolution that would copy what
it reads into such a layout then need not, so that it is measured with what inductor's code hands to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch._inductor import ir
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from trainfit.compiling.node_costs import signature_of_node
from trainfit.compiling.split_graphs import WITH_STATES, node_workspace
from trainfit.operators.families import CONVOLUTIONS
from trainfit.traces.trace import Signature, TensorSpec
from trainfit.workspace.measured import QUICK, measure_operators


def inside_bytes(node: Any, workspaces: dict[str, int]) -> int:
    """Return what the kernels of a scheduler's node need inside.

    `workspaces` are the bytes as the graph has them, by the node's name, and by the operator's.
    """
    found = [workspaces.get(name, workspaces.get(called, 0)) for name, called in _kernel_names(node)]
    found += [node_workspace(origin, workspaces) for origin in _given_states(node)]
    most = max(found, default=0)
    if not most:
        return 0
    laid_out = list(_laid_out(node))
    if not laid_out:
        return most
    with _disable_current_modes(), torch._C._DisableTorchDispatch():
        measured = measure_operators(laid_out, QUICK)
    return max(most if result is None else result.workspace_bytes for result in measured)


def _kernel_names(node: Any) -> Iterator[tuple[str, str]]:
    """Yield what a node calls as kernels of their own: the FX node and the operator (`aten.mm.default`)."""
    for part in node.get_nodes():
        called = getattr(part.node, "op_overload", None)
        if called is not None and isinstance(part.node, ir.ExternKernel):
            origin = part.node.get_origin_node()
            yield "" if origin is None else origin.name, str(called)


def _given_states(node: Any) -> Iterator[Node]:
    """Yield the nodes of the graph that run an operator with a random state, where a kernel is their call."""
    for part in node.get_nodes():
        if isinstance(part.node, ir.ExternKernel):
            yield from (found for found in part.node.get_origins() if found.target in WITH_STATES)


def called_node(kernel: Any, origins: Iterator[Node]) -> Node | None:
    """Return the graph's node that a kernel of torch's own is the call of."""
    called = getattr(kernel, "op_overload", None)
    if not isinstance(called, torch._ops.OpOverload):
        return None
    first: Node | None = kernel.get_origin_node()
    for found in (*([first] if first is not None else []), *origins):
        target = found.target
        if isinstance(target, torch._ops.OpOverload) and target._schema.name == called._schema.name:
            return found
    return None


def _laid_out(node: Any) -> Iterator[Signature]:
    """Yield the convolutions that a scheduler's node calls, their inputs as inductor lays them out."""
    for part in node.get_nodes():
        kernel = part.node
        if (
            not isinstance(kernel, ir.ExternKernel)
            or str(getattr(kernel, "op_overload", "")) not in CONVOLUTIONS
        ):
            continue
        called = called_node(kernel, iter(kernel.get_origins()))
        signature = None if called is None else signature_of_node(called)
        if signature is None:
            continue
        given = [layout for layout in map(_layout, kernel.inputs) if layout is not None]
        if [shape for shape, _ in given] == [spec.shape for spec in signature.inputs]:
            inputs = (
                TensorSpec(spec.dtype, shape, stride)
                for spec, (shape, stride) in zip(signature.inputs, given)
            )
            yield replace(signature, inputs=tuple(inputs))


def _layout(value: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return size and stride of what a kernel reads; None if they are no numbers."""
    size, stride = value.get_size(), value.maybe_get_stride()
    if stride is None or not all(getattr(n, "is_number", True) for n in (*size, *stride)):
        return None
    return tuple(map(int, size)), tuple(map(int, stride))
