"""What inductor's code of a graph will need: the graph is lowered, fused and ordered by inductor itself.

Nothing is compiled: inductor goes as far as writing its code, whose memory is read off (`written_code.py`).
The graph that is looked at is a copy.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._guards import detect_fake_mode
from torch._inductor import config, ir
from torch._inductor.compile_fx import _recursive_post_grad_passes, fake_tensor_prop
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node

from trainfit.compiling.kernel_workspaces import inside_bytes
from trainfit.compiling.split_graphs import names_in_backward, results_of
from trainfit.compiling.written_code import GivenStorage, WrittenCode, written_code

_graph_numbers = itertools.count(10**6)
"""Of graphs that are looked at: inductor counts its own from 0."""


Stride = tuple[int, ...]


class KernelPeaks(NamedTuple):
    """What inductor's code of two graphs needs, above what is the caller's."""

    forward_bytes: int
    backward_bytes: int
    laid_out_bytes: int
    """Of copies of the caller's tensors that forward hands to backward in the place of these."""


def kernel_peaks(
    forward: GraphModule,
    backward: GraphModule,
    donated: Sequence[str],
    workspaces: dict[str, int],
    forward_outputs: int,
) -> KernelPeaks:
    """Return the most bytes that inductor's code of two graphs has alive, above what is the caller's.

    `donated` are placeholders that backward may write over; `workspaces` the bytes that kernels of operators
    need inside, by the node's name, and by the operator's for nodes that inductor has made.
    """
    with lowered(forward, backward=False) as graph:
        code = written_code(graph)
        first, strides = _most(graph, code, workspaces), output_strides(graph)
    sizes = {storage.name: storage.bytes for storage in code.storages}
    names = names_in_backward(forward, backward, forward_outputs)
    given = handed_on(code.results, sizes, names)
    own = {node.name for node in forward.graph.find_nodes(op="placeholder")}
    copies = sum(storage.bytes for storage in given if not own.isdisjoint(storage.names))
    strided = kept_strides(forward, strides)
    with lowered(backward, backward=True, donated=donated, strides=strided) as graph:
        return KernelPeaks(first, _most(graph, written_code(graph, given), workspaces), copies)


def handed_on(
    results: Sequence[str | None], sizes: Mapping[str, int], names: Sequence[str]
) -> list[GivenStorage]:
    """Return the memory that forward hands to backward, which calls it by these names.

    `results` are the storages of all that forward returns, with their bytes; None for what is the caller's. A
    parameter can be among them: a copy that lies otherwise.
    """
    outputs = len(results) - len(names)
    found: dict[str, list[str]] = {}
    for name, made in zip(names, results[outputs:], strict=True):
        if name and made is not None:
            found.setdefault(made, []).append(name)
    returned = set(results[:outputs])
    return [GivenStorage(tuple(n), sizes.get(made, 0), made in returned) for made, n in found.items()]


def kept_strides(forward: GraphModule, strides: Sequence[Stride | None]) -> dict[str, Stride]:
    """Return how what forward returns lies in memory, by its name: backward is compiled for that."""
    pairs = zip(results_of(forward), strides, strict=True)
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
    # While torch.compile divides a graph a fake mode is active, and when it lowers one there is none.
    without_modes = unset_fake_temporarily()
    with without_modes, V.set_fake_mode(fake_mode), DebugContext(), config.patch(fx_graph_cache=False):
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


def _most(graph: GraphLowering, code: WrittenCode, workspaces: dict[str, int]) -> int:
    """Return the most bytes that the code of a graph has alive."""
    alive = code.alive()
    for node, call in zip(graph.scheduler.nodes, code.called_at):
        inside = inside_bytes(node, workspaces) if call >= 0 else 0
        if inside:
            alive[call] += inside  # a call of torch's own is one node
    return max(alive, default=0)


def _lying(value: Any, stride: Stride | None) -> Any:
    """Return a tensor as it lies in memory with a stride; the tensor itself if that is how it lies."""
    if stride is None or not isinstance(value, torch.Tensor) or tuple(value.stride()) == stride:
        return value
    return value.as_strided(value.size(), stride)
