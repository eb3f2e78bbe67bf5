"""Which graphs a compiled model has, found out by running it once: their trade-offs and their calls in order.

The model runs forward with every graph divided so that only its inputs are kept, node by node without a
compiler: that needs little memory and takes as long as a forward. Random states and buffers are put back. The
graphs are those that the compiler sees later, because Dynamo and AOTAutograd are the same.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import _recursive_joint_graph_passes
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch.fx import GraphModule

from trainfit.compiling.graph_planner import Backend, GraphPlanner
from trainfit.compiling.joint_problem import CannotPlan
from trainfit.compiling.node_costs import NodeCosts
from trainfit.compiling.step_shares import GraphUse


class GraphProbe:
    """A backend of torch.compile that notes the graphs and their calls."""

    def __init__(self, costs: NodeCosts, backend: Backend) -> None:
        """Look at graphs as this backend would get them."""
        self.planners: list[GraphPlanner | None] = []
        """In the order of compiling; None for what is not planned."""
        self.calls: list[int] = []
        self._costs = costs
        self._backend: Backend = backend

    def __call__(self, gm: GraphModule, example_inputs: Any, **_: Any) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs."""
        before = len(self.planners)
        options = tracing_options(self._backend)
        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=self._divide, **options
        )(gm, example_inputs)
        if len(self.planners) == before:
            return compiled  # nothing in it has a gradient

        def counted(*args: Any) -> Any:
            self.calls.append(before)
            return compiled(*args)

        return counted

    def uses(self) -> list[GraphUse]:
        """Return the trade-offs of the graphs, as far as they were planned."""
        for planner in self.planners:
            if planner is not None and len(self.calls) > 1:
                planner.search.look_everywhere()
        return [
            GraphUse(tuple(planner.search.trade_offs), planner.gradient_bytes())
            for planner in self.planners
            if planner is not None
        ]

    def _divide(self, gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        gm = as_divided(gm, self._backend)
        outputs = kwargs["num_fwd_outputs"]
        static = kwargs.get("static_lifetime_input_indices") or ()
        try:
            planner = GraphPlanner(
                gm, forward_outputs=outputs, costs=self._costs, backend=self._backend, static_inputs=static
            )
        except CannotPlan:
            self.planners.append(None)
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        self.planners.append(planner)
        least = min(planner.search.partitions, key=lambda partition: partition.held_bytes)
        return planner.split_only(least)


def as_divided(gm: GraphModule, backend: Backend) -> GraphModule:
    """Return a joint graph as a backend's partitioner gets it: inductor has its own passes before that."""
    if backend != "inductor":
        return gm
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    device = next((value.device for value in values if isinstance(value, torch.Tensor)), None)
    with V.set_fake_mode(detect_fake_mode(values)):
        return _recursive_joint_graph_passes(gm, skip_invoke_subgraph=True, input_device=device)


def tracing_options(backend: Backend) -> dict[str, Any]:
    """Return what a backend tells AOTAutograd: which operators it wants in parts, and writes in graphs."""
    if backend != "inductor":
        return {}
    return {"decompositions": select_decomp_table(), "keep_inference_input_mutations": True}


@contextlib.contextmanager
def nothing_changed(model: nn.Module) -> Iterator[None]:
    """Put back the model's buffers and torch's random states after the block."""
    buffers = {name: copy.deepcopy(buffer.detach()) for name, buffer in model.named_buffers()}
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers and not torch.equal(buffer, buffers[name]):
                        buffer.copy_(buffers[name])
