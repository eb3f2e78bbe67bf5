"""One joint graph within limits: planned, divided, and certified by what its code will need.

A partition is found by the model of `partition_memory.py`. What the two graphs then need is counted on them:
for `aot_eager` node by node, for `inductor` on the kernels that inductor makes of them. Where that is more
than the limits, a slower one is taken, and a faster one where there is room: halving finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.fx import GraphModule, Node

from trainfit.compiling.backward_orders import BackwardOrders
from trainfit.compiling.joint_problem import CannotPlan, read_joint_graph
from trainfit.compiling.kernel_memory import KernelPeaks, kernel_peaks
from trainfit.compiling.node_costs import NodeCosts
from trainfit.compiling.partition_search import PartitionSearch
from trainfit.compiling.recompute_problem import GraphLimits, Partition, RecomputeProblem, Role
from trainfit.compiling.split_graphs import given_away, graph_peak, prepared, split, with_better_order
from trainfit.compiling.torch_choices import torch_choice

Backend = Literal["inductor", "aot_eager"]

CANDIDATES: dict[str, int] = {"aot_eager": 1024, "inductor": 24}
"""Among how many partitions of a graph is chosen; counting inductor's kernels takes seconds."""
_SMALLEST: dict[Backend, int] = {"aot_eager": 1, "inductor": 3}
"""Of how many with the smallest peaks the smallest is found by counting."""
_SURE = (0.3, 0.7)
"""How far below and above a limit inductor's kernels may be from the model's peak, as a share of it."""


@dataclass(frozen=True)
class DividedGraph:
    """A joint graph divided, and what its two graphs need."""

    forward: GraphModule
    backward: GraphModule
    partition: Partition
    forward_peak_bytes: int
    backward_peak_bytes: int
    """With the gradients from outside, and with what forward returned."""
    laid_out_bytes: int = 0
    """Of copies of the caller's tensors that inductor lays out otherwise and hands to backward."""

    @property
    def held_bytes(self) -> int:
        """What is there between forward and backward."""
        return self.partition.held_bytes + self.laid_out_bytes

    @property
    def peak_bytes(self) -> int:
        """The most of forward and backward."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    def excess(self, limits: GraphLimits) -> float:
        """Return by how many bytes it is above its limits; 0 or less: it is within."""
        return limits.exceeded_by(self.forward_peak_bytes, self.held_bytes, self.backward_peak_bytes)


class GraphPlanner:
    """Plans one joint graph, for as many limits as are asked for."""

    def __init__(
        self,
        module: GraphModule,
        *,
        forward_outputs: int,
        costs: NodeCosts,
        backend: Backend,
        static_inputs: Sequence[int] = (),
    ) -> None:
        """Read the graph; raises `CannotPlan` where it has something that is not planned."""
        self._module = prepared(module, forward_outputs)
        self._forward_outputs = forward_outputs
        self._backend = backend
        self._static = tuple(static_inputs)
        self.problem, self._nodes = read_joint_graph(
            self._module, forward_outputs, costs, fuses=backend == "inductor"
        )
        if not self.problem.backward_nodes:
            raise CannotPlan("it has no backward")
        self._changes_size = any(isinstance(node.meta.get("val"), torch.SymInt) for node in self._nodes)
        self._divided: dict[tuple[int, ...], DividedGraph] = {}
        self._workspaces = problem_workspaces(self.problem, self._nodes)
        self.search = PartitionSearch(self.problem)
        self._orders = BackwardOrders(self.search.memory)
        if self.search.smallest() is None:
            raise CannotPlan("backward needs something that can neither be kept nor run again")

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the joint graph, in the order of the problem's."""
        return self._nodes

    @property
    def node_names(self) -> tuple[str, ...]:
        """The names of the joint graph's nodes."""
        return tuple(node.name for node in self._nodes)

    def torch_choice(self, fraction: float = 1.0) -> set[int]:
        """Return the nodes that torch's own partitioner would keep, and those that must not run again.

        Torch runs some of these again all the same, where it does not matter what comes of it.
        """
        number = {node: place for place, node in enumerate(self._nodes)}
        chosen = torch_choice(self._module, self._forward_outputs, self._static, fraction)
        nodes, users = self.problem.nodes, self.problem.users
        once = {n for n in self.problem.useful if not nodes[n].repeatable}
        once |= {user for n in once for user in users[n] if nodes[user].picks}
        return once | self.problem.behind_views(number[node] for node in chosen)

    def gradient_bytes(self) -> int:
        """Return the bytes of what backward returns: the gradients of parameters and inputs."""
        storages = {s for n in self.problem.backward_outputs for s in self.problem.nodes[n].storages}
        return sum(self.problem.sizes[storage] for storage in storages)

    def input_bytes(self) -> int:
        """Return the bytes of the graph's inputs that are no parameters or buffers."""
        primals = [n for n, node in enumerate(self._nodes) if node.op == "placeholder"]
        primals = [n for n in primals if self.problem.nodes[n].role is Role.INPUT]
        static = {
            s for n in self._static if n < len(primals) for s in self.problem.nodes[primals[n]].storages
        }
        given = {s for n in primals for s in self.problem.nodes[n].storages} - static
        return sum(self.problem.sizes[storage] for storage in given)

    def split_only(self, partition: Partition) -> tuple[GraphModule, GraphModule]:
        """Divide the graph as a partition says."""
        return split(
            self._module,
            partition,
            self.problem,
            self._nodes,
            forward_outputs=self._forward_outputs,
            static_inputs=self._static,
        )

    def divide(self, partition: Partition) -> DividedGraph:
        """Divide the graph as a partition says, and count what its graphs need; each once."""
        if partition.kept not in self._divided:
            self._divided[partition.kept] = self._counted(partition)
        return self._divided[partition.kept]

    def _counted(self, partition: Partition) -> DividedGraph:
        forward, backward = self.split_only(partition)
        kept = given_away(backward)
        if self._changes_size:
            # For the largest sizes there is the model alone: the graphs know those they were traced with.
            most = partition.forward_peak_bytes, partition.backward_peak_bytes
            return DividedGraph(forward, backward, partition, *most)
        if self._backend == "aot_eager":
            inside = self._workspaces
            backward, peak = with_better_order(backward, inside)
            peaks = KernelPeaks(graph_peak(forward, (), inside), peak, 0)
        else:
            peaks = kernel_peaks(forward, backward, kept, self._workspaces, self._forward_outputs)
        most = peaks.forward_bytes, peaks.backward_bytes + self._beside(partition)
        return DividedGraph(forward, backward, partition, *most, peaks.laid_out_bytes)

    def fastest(self, limits: GraphLimits) -> DividedGraph | None:
        """Return the fastest division that keeps the limits as it was counted; None if none was found.

        The partitions to choose from do not depend on a limit, and neither do those that are looked at in the
        middle of others: so a higher limit never has a slower division.
        """
        if not limits.forward_bytes == limits.held_bytes == limits.backward_bytes:
            self.search.fastest(limits)
        found = self.search.candidates(limits, CANDIDATES[self._backend])
        # Behind `low` all are too large, from `high` on they fit.
        low, high = -1, len(found)
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(found[middle], limits):
                high = middle
            else:
                low = middle
        for partition in found[high:]:
            divided = self.divide(partition)
            if divided.excess(limits) <= 0:
                return divided
        return None

    def _fits(self, partition: Partition, limits: GraphLimits) -> bool:
        """Whether a partition keeps the limits: kernels are counted, unless the model is far from them."""
        if self._backend == "aot_eager":
            return self._fits_in_order(partition, limits)
        below, above = _SURE
        least = min(limits.forward_bytes, limits.held_bytes, limits.backward_bytes)
        if partition.held_bytes > limits.held_bytes or partition.excess(limits) > above * least:
            return False
        if partition.excess(limits) < -below * least:
            return True
        return self.divide(partition).excess(limits) <= 0

    def _fits_in_order(self, partition: Partition, limits: GraphLimits) -> bool:
        """Whether a partition keeps the limits, in the graph's own order or with another one of backward."""
        if partition.excess(limits) <= 0:
            return True
        if (
            self._changes_size
            or limits.exceeded_by(partition.forward_peak_bytes, partition.held_bytes, 0) > 0
        ):
            return False
        return self._orders.backward_peak(partition) <= limits.backward_bytes

    def smallest(self) -> DividedGraph:
        """Return the division with the smallest peak that the search knows.

        What inductor makes of partitions may put them into another order: of some the smallest as counted.
        """
        partition = self.search.smallest()
        assert partition is not None, "checked when the graph was read"
        near = self.search.partitions[: _SMALLEST[self._backend]]
        return min(map(self.divide, (partition, *near)), key=lambda divided: divided.peak_bytes)

    def _beside(self, partition: Partition) -> int:
        """Return what is alive while backward runs and is not counted in its graph: outputs and tangents."""
        nodes, problem = self.problem.nodes, self.problem
        kept = {s for n in partition.kept for s in nodes[n].storages}
        beside = set(problem.output_storages) - kept
        beside |= {s for node in nodes if node.role is Role.TANGENT for s in node.storages}
        return sum(problem.sizes[storage] for storage in beside)


def workspaces_by_name(pairs: Iterable[tuple[int, Node]]) -> dict[str, int]:
    """Return the bytes that kernels need inside by the names of nodes; by operator the most of all calls."""
    found: dict[str, int] = {}
    for inside, node in pairs:
        if isinstance(node.target, torch._ops.OpOverload):
            found[node.name] = inside
            found[str(node.target)] = max(found.get(str(node.target), 0), inside)
    return found


def problem_workspaces(problem: RecomputeProblem, nodes: Sequence[Node]) -> dict[str, int]:
    """Return the same of the nodes of a problem."""
    return workspaces_by_name((entry.workspace_bytes, node) for entry, node in zip(problem.nodes, nodes))
