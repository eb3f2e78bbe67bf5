"""The partitioner that torch.compile calls: each joint graph is divided within its share of the budget.

It is a `CustomPartitionerFn` of inductor with an identity of its own, so that torch's caches of compiled code
keep working: code is found again as long as the budget, the shares and our own code are the same. `aot_eager`
calls it directly. What cannot be planned is divided by torch's own partitioner, with one warning.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule

from trainfit.basics.units import format_bytes
from trainfit.compiling.compile_plan import CompilePlan, PlannedGraph
from trainfit.compiling.graph_planner import Backend, DividedGraph, GraphPlanner
from trainfit.compiling.joint_problem import CannotPlan
from trainfit.compiling.node_costs import NodeCosts
from trainfit.compiling.recompute_problem import GraphLimits
from trainfit.compiling.remembered_plans import RememberedGraph
from trainfit.errors import BudgetTooSmall


class PlannedPartitioner(CustomPartitionerFn):
    """Divides the joint graphs of one model, in the order in which they are compiled."""

    def __init__(self, plan: CompilePlan, costs: NodeCosts, backend: Backend) -> None:
        """Begin with the whole budget for every graph; `shares` are the limits of graphs that are known."""
        self.plan = plan
        self.shares: list[GraphLimits] = []
        self._costs = costs
        self._backend: Backend = backend
        self._warned = False
        self._batch_counted = False

    def batch_is_counted(self) -> None:
        """Note that the batch is among what is there all the time already."""
        self._batch_counted = True

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Return the graphs of forward and backward."""
        limits = self._limits()
        try:
            divided, planner = self._divided(gm, limits, **kwargs)
        except CannotPlan as why:
            self._warn(str(why))
            self.plan.graphs.append(
                PlannedGraph(len(gm.graph.nodes), (), 0, 0, 0.0, 0, 0, 0, 0, limits, refused=str(why))
            )
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        self.plan.graphs.append(_described(divided, planner, limits))
        return divided.forward, divided.backward

    def note(self, known: RememberedGraph) -> None:
        """Take what an earlier process has planned for the next graph: its compiled code is used again."""
        self.batch_is_counted()
        self.plan.standing_bytes = known.standing_bytes
        self.plan.graphs.append(known.graph)
        if known.graph.refused:
            self._warn(known.graph.refused)

    def uuid(self) -> Any:
        """Identify the decisions for torch's caches: our code, the budget and who shares it."""
        device = self._costs.device.name
        shares = tuple((s.forward_bytes, s.held_bytes, s.backward_bytes) for s in self.shares)
        plan = self.plan
        return (code_hash(), self._backend, device, plan.budget_bytes, plan.standing_bytes, shares)

    def _divided(
        self,
        gm: GraphModule,
        limits: GraphLimits,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> tuple[DividedGraph, GraphPlanner]:
        planner = GraphPlanner(
            gm,
            forward_outputs=num_fwd_outputs,
            costs=self._costs,
            backend=self._backend,
            static_inputs=static_lifetime_input_indices or (),
        )
        if not self._batch_counted:
            # The batch is known only now, and it is there all the time.
            self._batch_counted = True
            self.plan.standing_bytes += planner.input_bytes()
            limits = self._limits()
        divided = planner.fastest(limits)
        if divided is None:
            divided = planner.smallest()
            if divided.excess(limits) > 0:
                raise too_small(self.plan, divided.peak_bytes)
        return divided, planner

    def _limits(self) -> GraphLimits:
        """Return the limits of the next graph: its share, or all of the budget."""
        place = len(self.plan.graphs)
        if place < len(self.shares):
            return self.shares[place]
        if self.shares:
            # Compiled again for other shapes: whichever graph it is, the least of all shares is safe.
            return GraphLimits(
                min(s.forward_bytes for s in self.shares),
                min(s.held_bytes for s in self.shares),
                min(s.backward_bytes for s in self.shares),
            )
        return GraphLimits.same(self.plan.budget_bytes - self.plan.standing_bytes)

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"torch's own partitioner divides a graph of the compiled model, because {why}: its memory "
                "is not planned, and the budget may not be kept.",
                stacklevel=2,
            )


def too_small(plan: CompilePlan, reached_bytes: int) -> BudgetTooSmall:
    """Return the error for a budget that no partition keeps."""
    smallest = plan.standing_bytes + reached_bytes
    return BudgetTooSmall(
        f"no plan of the compiled step fits {format_bytes(plan.budget_bytes)}; the smallest peak that was "
        f"reached is {format_bytes(smallest)}, of which {format_bytes(plan.standing_bytes)} is there all the "
        "time (parameters, buffers, optimizer state, the batch). Give a larger budget or a smaller batch.",
        smallest,
    )


def _described(divided: DividedGraph, planner: GraphPlanner, limits: GraphLimits) -> PlannedGraph:
    partition = divided.partition
    names = planner.node_names
    return PlannedGraph(
        nodes=len(names),
        kept=tuple(names[n] for n in partition.kept),
        kept_bytes=partition.kept_bytes,
        repeated=len(partition.repeated),
        seconds=partition.seconds,
        forward_peak_bytes=divided.forward_peak_bytes,
        backward_peak_bytes=divided.backward_peak_bytes,
        held_bytes=divided.held_bytes,
        gradient_bytes=planner.gradient_bytes(),
        limits=limits,
    )


@functools.cache
def code_hash() -> str:
    """Hash the code that decides: compiled code is used again as long as that does not change."""
    package = Path(__file__).parent.parent
    hasher = hashlib.sha256()
    for folder in ("basics", "compiling", "costs", "operators", "ordering", "order_fronts"):
        for file in sorted((package / folder).glob("*.py")):
            hasher.update(file.read_bytes())
    return hasher.hexdigest()
