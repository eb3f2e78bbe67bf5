"""What inductor's code of a graph will need: the graph is lowered, fused and ordered by inductor itself.

Nothing is compiled: inductor goes as far as its final list of kernels, and their memory is counted as the
code has it (`order_fronts/scheduler_memory.py`, `reuse.py`). The graph that is looked at is a copy.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._inductor import config, ir
from torch._inductor.compile_fx import _recursive_post_grad_passes, fake_tensor_prop
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from trainfit.compiling.kernel_workspaces import inside_bytes
from trainfit.order_fronts.reuse import live_bytes_with_reuse
from trainfit.order_fronts.scheduler_memory import kinds_of_buffers, planned_graph, precise_graph

_graph_numbers = itertools.count(10**6)
"""Of graphs that are looked at: inductor counts its own from 0."""


Stride = tuple[int, ...]


def kernel_peaks(
    forward: GraphModule, backward: GraphModule, donated: Sequence[str], workspaces: dict[str, int]
) -> tuple[int, int]:
    """Return the most bytes that inductor's code of two graphs has alive, above what is the caller's.

    `donated` are placeholders that backward may write over; `workspaces` the bytes that kernels of operators
    need inside, by the node's name, and by the operator's for nodes that inductor has made.
    """
    with lowered(forward, backward=False) as graph:
        first, strides = _counted(graph, workspaces), output_strides(graph)
    laid_out = kept_strides(forward, strides)
    with lowered(backward, backward=True, donated=donated, strides=laid_out) as graph:
        return first, _counted(graph, workspaces)


def kept_strides(forward: GraphModule, strides: Sequence[Stride | None]) -> dict[str, Stride]:
    """Return how what forward returns lies in memory, by its name: backward is compiled for that."""
    results = tree_leaves(next(node for node in forward.graph.nodes if node.op == "output").args)
    pairs = zip(results, strides, strict=True)
    return {leaf.name: stride for leaf, stride in pairs if isinstance(leaf, Node) and stride is not None}


def output_strides(graph: GraphLowering) -> list[Stride | None]:
    """Return how the results of a graph lie in memory; None for what is no tensor, or of changing size."""
    found: list[Stride | None] = []
    for result in graph.graph_outputs:
        stride = None if isinstance(result, ir.NoneAsConstantBuffer) else result.maybe_get_stride()
        known = stride is not None and all(getattr(n, "is_number", True) for n in stride)
        found.append(tuple(map(int, stride)) if stride is not None and known else None)
    return found


def copied(module: GraphModule) -> GraphModule:
    """Return a copy of a graph; torch warns about itself when it copies what Dynamo notes in one."""
    with warnings.catch_warnings(action="ignore"):
        return copy.deepcopy(module)


@contextlib.contextmanager
def lowered(
    module: GraphModule,
    *,
    backward: bool,
    donated: Sequence[str] = (),
    strides: Mapping[str, Stride] | None = None,
) -> Iterator[GraphLowering]:
    """Lower a copy of a graph up to inductor's final list of kernels, which can be asked in the block.

    `strides` are those of placeholders that lie otherwise than the graph says.
    """
    module = copied(module)
    placeholders = module.graph.find_nodes(op="placeholder")
    inputs = [_lying(node.meta["val"], (strides or {}).get(node.name)) for node in placeholders]
    fake_mode = detect_fake_mode(inputs)
    assert fake_mode is not None, "the inputs of a joint graph are fake tensors"
    with V.set_fake_mode(fake_mode), DebugContext(), config.patch(fx_graph_cache=False):
        view_to_reshape(module)
        if any(value is not node.meta["val"] for value, node in zip(inputs, placeholders)):
            # What was a view of the one layout may be a copy of the other.
            fake_tensor_prop(module, inputs)
        _recursive_post_grad_passes(module, is_inference=False)
        graph = GraphLowering(
            module,
            example_inputs=inputs,
            shape_env=fake_mode.shape_env,
            is_backward=backward,
            is_inference=False,
            graph_id=next(_graph_numbers),
        )
        graph.bw_donated_idxs = [n for n, node in enumerate(placeholders) if node.name in set(donated)]
        with V.set_graph_handler(graph), torch.no_grad():
            graph.run(*inputs)
            graph.init_wrapper_code()
            graph._update_scheduler()
            yield graph


def _counted(graph: GraphLowering, workspaces: dict[str, int]) -> int:
    nodes = graph.scheduler.nodes
    planned = planned_graph(nodes)
    steps = range(len(nodes))
    alive = live_bytes_with_reuse(
        planned,
        precise_graph(nodes, planned, in_this_order=True),
        steps,
        *kinds_of_buffers(nodes, in_this_order=True),
    )
    inside = [inside_bytes(node, workspaces) for node in nodes]
    return max((bytes_ + extra for bytes_, extra in zip(alive, inside)), default=0)


def _lying(value: Any, stride: Stride | None) -> Any:
    """Return a tensor as it lies in memory with a stride; the tensor itself if that is how it lies."""
    if stride is None or not isinstance(value, torch.Tensor) or tuple(value.stride()) == stride:
        return value
    return value.as_strided(value.size(), stride)
