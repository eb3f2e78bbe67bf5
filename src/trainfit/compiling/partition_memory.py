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

import itertools
from collections.abc import Collection, Sequence

from trainfit.compiling.fast_partitions import (
    GraphRows,
    Judgement,
    PartitionJudge,
    least_worth_keeping,
    relieving,
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
        self._whole = PartitionJudge(self.rows)
        # Views are in the way of what only needs memory and time.
        fewer = None if self.rows.fuses else rows_without_views(problem)
        self.judge = self._whole if fewer is None else PartitionJudge(fewer)
        self._rows = self.judge.rows
        self._latest: tuple[tuple[int, ...], Judgement | None] = ((), None)
        """The last one: what is asked of a partition is mostly asked when it was judged."""

    def partition(self, chosen: Collection[int]) -> Partition | None:
        """Return what keeping these nodes means; None if something is needed that cannot run again."""
        found = self.judge.judge(list(chosen))
        if found is None:
            return None
        kept = tuple(found.kept)
        self._latest = kept, found
        return Partition(
            kept,
            found.seconds,
            found.kept_bytes,
            found.held_bytes,
            found.forward_bytes,
            found.backward_bytes,
            self._what_runs,
        )

    def _what_runs(self, kept: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        found = self._whole.judge(list(kept))
        assert found is not None, "it was judged before"
        return tuple(found.repeated), tuple(found.order)

    def again(self, partition: Partition) -> list[int]:
        """Return what runs again, in order, without views."""
        return self.judged(partition).repeated

    def worth_keeping(self, partition: Partition) -> list[int]:
        """Return what runs again and could be kept as well, most seconds per byte first."""
        return worth_keeping(self._rows, self.again(partition))

    def least_worth_keeping(self, partition: Partition) -> list[int]:
        """Return what is kept, fewest seconds per byte first."""
        return [group[0] for group in self._least_worth_keeping(partition, True)]

    def _least_worth_keeping(self, partition: Partition, per_byte: bool) -> list[list[int]]:
        kept = list(partition.kept)
        return least_worth_keeping(self._rows, kept, kept, self.again(partition), per_byte)

    def relieving(self, partition: Partition, *, per_byte: bool = True) -> list[list[int]]:
        """Return what is kept and would not be there at the peak if let go of, fewest seconds first.

        Each comes with what can be let go of for nothing then.

        Where nodes are fused, all that is kept: there it is not known where the peak is.
        """
        if self._rows.fuses:
            return self._least_worth_keeping(partition, per_byte)
        return relieving(self._rows, self.judged(partition), per_byte)

    def judged(self, partition: Partition) -> Judgement:
        """Return all that is known of a partition."""
        kept, found = self._latest
        if found is None or kept != partition.kept:
            found = self.judge.judge(list(partition.kept))
            assert found is not None, "it was judged before"
            self._latest = partition.kept, found
        return found


def rows_of(problem: RecomputeProblem) -> GraphRows:
    """Return a problem as lists of numbers."""
    return _rows(problem, frozenset())


def rows_without_views(problem: RecomputeProblem) -> GraphRows:
    """Return the same with the readers of views reading what those are views of: same memory, same time.

    Views of forward values that backward itself has stay where they are: what they need is needed there.
    """
    nodes = problem.nodes
    results = {*problem.forward_outputs, *problem.backward_outputs}
    views = set()
    for number, node in enumerate(nodes):
        if node.fusing is not Fusing.VIEW or node.makes or node.workspace_bytes or number in results:
            continue
        if node.role is Role.FORWARD:
            left_out = node.repeatable and not node.keepable and not node.seconds
        else:
            left_out = node.role is Role.BACKWARD and all(
                nodes[read].role in (Role.BACKWARD, Role.TANGENT) for read in node.reads
            )
        read = {s for read in node.reads for s in nodes[read].storages}
        if left_out and node.reads and (node.picks or read <= set(node.storages)):
            views.add(number)
    return _rows(problem, views)


def _rows(problem: RecomputeProblem, views: Collection[int]) -> GraphRows:
    nodes = problem.nodes
    reads: list[list[int]] = []
    touches: list[list[int]] = []
    for number, node in enumerate(nodes):
        behind = (reads[read] if read in views else (read,) for read in node.reads)
        reads.append(list(dict.fromkeys(itertools.chain.from_iterable(behind))))
        storages = dict.fromkeys((*node.storages, *node.makes))
        if not node.picks:
            for read in node.reads:
                storages.update(dict.fromkeys(nodes[read].storages))
        touches.append([] if number in views else list(storages))
    rows = GraphRows(
        reads,
        [node.role is Role.FORWARD for node in nodes],
        [node.repeatable for node in nodes],
        [node.keepable for node in nodes],
        [float(node.seconds) for node in nodes],
        [node.workspace_bytes for node in nodes],
        [_KINDS[node.fusing] for node in nodes],
    )
    rows.picks = [node.picks for node in nodes]
    rows.set_storages(
        list(problem.sizes),
        [list(node.storages) for node in nodes],
        [list(node.makes) for node in nodes],
        touches,
        [storage in problem.input_storages for storage in range(len(problem.sizes))],
    )
    tangents = [n for n, node in enumerate(nodes) if node.role is Role.TANGENT]
    rows.set_results(list(problem.forward_outputs), list(problem.backward_outputs), tangents)
    rows.set_backward(
        [n for n in problem.backward_nodes if n not in views], [n for n in problem.useful if n not in views]
    )
    return rows
