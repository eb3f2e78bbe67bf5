"""What a choice of kept values costs: what runs again, in which order, and the bytes alive at every step.

Backward runs its own nodes in the order of the graph. What is computed again runs just before its first need,
once. A storage is alive from the node that makes it to the last that reads it; what is kept, returned or the
caller's stays.

A pointwise result that only fused kernels near it read is no memory: whoever reads it reads what it was
computed from. Near means that no kernel of its own (`Fusing.NOTHING`) runs between the first and the last
reader, and that it reads few tensors itself: else the compiler writes it to memory. Its result lies where
another value of its size was that it is the last to read.

A search asks for thousands of choices of one problem: `partition_judge.py` answers, and may be compiled.
"""

from __future__ import annotations

from collections.abc import Collection

from trainfit.compiling.fast_partitions import (
    GraphRows,
    PartitionJudge,
    least_worth_keeping,
    worth_keeping,
)
from trainfit.compiling.graph_rows import NOTHING, POINTWISE, REDUCTION, VIEW
from trainfit.compiling.recompute_problem import Fusing, Partition, RecomputeProblem, Role

_KINDS = {
    Fusing.NOTHING: NOTHING,
    Fusing.VIEW: VIEW,
    Fusing.POINTWISE: POINTWISE,
    Fusing.REDUCTION: REDUCTION,
}


def partition_of(problem: RecomputeProblem, chosen: Collection[int]) -> Partition | None:
    """Return what keeping these nodes means; None if something is needed that cannot run again.

    Nodes that nobody needs in backward are not kept, even if they are among the chosen.
    """
    return PartitionMemory(problem).partition(chosen)


def needed_again(problem: RecomputeProblem, chosen: Collection[int]) -> tuple[set[int], set[int]] | None:
    """Return which of the chosen nodes backward reads, and which others it has to run again."""
    found = PartitionJudge(rows_of(problem)).needed(list(chosen))
    return None if found is None else (set(found[0]), set(found[1]))


class PartitionMemory:
    """Answers for one problem what choices need."""

    def __init__(self, problem: RecomputeProblem) -> None:
        """Take what does not depend on the choice."""
        self.problem = problem
        self.rows = rows_of(problem)
        self._judge = PartitionJudge(self.rows)

    def partition(self, chosen: Collection[int]) -> Partition | None:
        """Return what keeping these nodes means; None if something is needed that cannot run again."""
        found = self._judge.judge(list(chosen))
        if found is None:
            return None
        return Partition(
            tuple(found.kept),
            tuple(found.repeated),
            tuple(found.order),
            found.seconds,
            found.kept_bytes,
            found.held_bytes,
            found.forward_bytes,
            found.backward_bytes,
        )

    def worth_keeping(self, partition: Partition) -> list[int]:
        """Return what runs again and could be kept as well, most seconds per byte first."""
        return worth_keeping(self.rows, list(partition.repeated))

    def least_worth_keeping(self, partition: Partition) -> list[int]:
        """Return what is kept, fewest seconds per byte first."""
        return least_worth_keeping(self.rows, list(partition.kept), list(partition.repeated))


def rows_of(problem: RecomputeProblem) -> GraphRows:
    """Return a problem as lists of numbers."""
    nodes = problem.nodes
    rows = GraphRows(
        [list(dict.fromkeys(node.reads)) for node in nodes],
        [node.role is Role.FORWARD for node in nodes],
        [node.repeatable for node in nodes],
        [node.keepable for node in nodes],
        [float(node.seconds) for node in nodes],
        [node.workspace_bytes for node in nodes],
        [_KINDS[node.fusing] for node in nodes],
    )
    touches: list[list[int]] = []
    for node in nodes:
        storages = dict.fromkeys((*node.storages, *node.makes))
        if not node.picks:
            for read in node.reads:
                storages.update(dict.fromkeys(nodes[read].storages))
        touches.append(list(storages))
    rows.set_storages(
        list(problem.sizes),
        [list(node.storages) for node in nodes],
        [list(node.makes) for node in nodes],
        touches,
        [storage in problem.input_storages for storage in range(len(problem.sizes))],
    )
    tangents = [n for n, node in enumerate(nodes) if node.role is Role.TANGENT]
    rows.set_results(list(problem.forward_outputs), list(problem.backward_outputs), tangents)
    rows.set_backward(list(problem.backward_nodes), list(problem.useful))
    return rows
