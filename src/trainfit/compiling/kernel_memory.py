"""What inductor's code of a graph will need: the graph is lowered, fused and ordered by inductor itself.

Nothing is compiled: inductor goes as far as its final list of kernels, and their memory is counted as the
code has it (`order_fronts/scheduler_memory.py`, `reuse.py`). The graph that is looked at is a copy.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._inductor import config
from torch._inductor.compile_fx import _recursive_post_grad_passes
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx import GraphModule

from trainfit.order_fronts.reuse import live_bytes_with_reuse
from trainfit.order_fronts.scheduler_memory import (
    kernel_names,
    kinds_of_buffers,
    planned_graph,
    precise_graph,
)

_graph_numbers = itertools.count(10**6)
"""Of graphs that are looked at: inductor counts its own from 0."""


def kernel_peak(
    module: GraphModule,
    *,
    backward: bool,
    donated: Sequence[str] = (),
    workspaces: dict[str, int] | None = None,
) -> int:
    """Return the most bytes that inductor's code of a graph has alive, above what is the caller's.

    `donated` are placeholders that backward may write over; `workspaces` the bytes that kernels of operators
    need inside, by the node's name, and by the operator's for nodes that inductor has made.
    """
    with lowered(module, backward=backward, donated=donated) as graph:
        return _counted(graph, workspaces or {})


def copied(module: GraphModule) -> GraphModule:
    """Return a copy of a graph; torch warns about itself when it copies what Dynamo notes in one."""
    with warnings.catch_warnings(action="ignore"):
        return copy.deepcopy(module)


@contextlib.contextmanager
def lowered(module: GraphModule, *, backward: bool, donated: Sequence[str] = ()) -> Iterator[GraphLowering]:
    """Lower a copy of a graph up to inductor's final list of kernels, which can be asked in the block."""
    module = copied(module)
    placeholders = module.graph.find_nodes(op="placeholder")
    inputs = [node.meta["val"] for node in placeholders]
    fake_mode = detect_fake_mode(inputs)
    assert fake_mode is not None, "the inputs of a joint graph are fake tensors"
    with V.set_fake_mode(fake_mode), DebugContext(), config.patch(fx_graph_cache=False):
        view_to_reshape(module)
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
        planned, precise_graph(nodes, planned, in_this_order=True), steps, *kinds_of_buffers(nodes)
    )
    inside = [inside_bytes(node, workspaces) for node in nodes]
    return max((bytes_ + extra for bytes_, extra in zip(alive, inside)), default=0)


def inside_bytes(node: Any, workspaces: dict[str, int]) -> int:
    """Return what the kernels of a scheduler's node need inside."""
    found = (workspaces.get(name, workspaces.get(called, 0)) for name, called in kernel_names(node))
    return max(found, default=0)
