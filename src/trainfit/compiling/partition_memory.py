"""What a choice of kept values costs: what runs again, in which order, and the bytes alive at every step.

Backward runs its own nodes in the order of the graph. What is computed again runs just before its first need,
once. A storage is alive from the node that makes it to the last that reads it; what is kept, returned or the
caller's stays.

A pointwise result that only fused kernels near it read is no memory: whoever reads it reads what it was
computed from. Near means that no kernel of its own (`Fusing.NOTHING`) runs between the first and the last
reader, and that it reads few tensors itself: else the compiler writes it to memory. Its result lies where
another value of its size was that it is the last to read.

A search asks for hundreds of choices of one problem, so that what is the same for all of them is found once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainfit.compiling.backward_needs import NEVER, BackwardNeeds, Numbers
from trainfit.compiling.recompute_problem import Fusing, Partition, RecomputeProblem, Role

_MOST_FUSED_READS = 4
"""A pointwise result that several kernels read and that reads more tensors is written to memory."""
FUSED_SHARE = 0.05
"""Of the seconds of a pointwise node, where it is computed inside of other kernels."""


def partition_of(problem: RecomputeProblem, chosen: Collection[int]) -> Partition | None:
    """Return what keeping these nodes means; None if something is needed that cannot run again.

    Nodes that nobody needs in backward are not kept, even if they are among the chosen.
    """
    return PartitionMemory(problem).partition(chosen)


class PartitionMemory:
    """Answers for one problem what choices need."""

    def __init__(self, problem: RecomputeProblem) -> None:
        """Take what does not depend on the choice."""
        self.problem = problem
        self._layout = _Layout(problem)
        nodes = problem.nodes
        tangents = {s for node in nodes if node.role is Role.TANGENT for s in node.storages}
        returned = {storage for n in problem.backward_outputs for storage in nodes[n].storages}
        self._outputs = _mask(len(problem.sizes), problem.output_storages)
        self._given_to_backward = _mask(len(problem.sizes), tangents) | self._outputs
        self._staying_in_backward = _mask(len(problem.sizes), returned | tangents) | self._outputs
        self._ours = ~_mask(len(problem.sizes), problem.input_storages)
        self._seconds = [node.seconds for node in nodes]
        self._reach = BackwardNeeds(problem)
        self._forward_base = self._forward_nodes(problem.forward_outputs, frozenset())
        self._forward_order = sorted(self._forward_base)

    def partition(self, chosen: Collection[int]) -> Partition | None:
        """Return what keeping these nodes means; None if something is needed that cannot run again."""
        problem, layout = self.problem, self._layout
        found = self._reach.needed(chosen)
        if found is None:
            return None
        kept, repeated, places = found
        kept.reverse()
        count = len(problem.sizes)
        keeping = _mask(count, (s for n in kept for s in problem.nodes[n].storages)) & self._ours
        held = keeping | self._outputs
        more = self._forward_nodes(kept, self._forward_base)
        running = sorted(self._forward_base | more) if more else self._forward_order
        if layout.fuses:
            running = self._kept_last(running, set(kept))
        forward = _GraphRun(layout, running, (*problem.forward_outputs, *kept))
        order = self._reach.order(repeated, places)
        repeated.reverse()
        backward = _GraphRun(layout, order, problem.backward_outputs)
        seconds, fused = self._seconds, backward.fused
        return Partition(
            tuple(kept),
            tuple(repeated),
            tuple(order.tolist()),
            sum([seconds[n] * (FUSED_SHARE if n in fused else 1.0) for n in repeated]),
            int(layout.sizes[keeping].sum()),
            int(layout.sizes[held].sum()),
            forward.peak(np.zeros(count, dtype=bool), held),
            # The caller has what forward returned while backward runs.
            backward.peak(keeping | self._given_to_backward, self._staying_in_backward),
        )

    def _kept_last(self, running: Sequence[int], kept: Collection[int]) -> list[int]:
        """Return forward with fused results that are only kept behind the others, up to the next own kernel.

        A compiler writes them when nothing else reads what they are computed from.
        """
        users, kinds = self.problem.users, self._layout.kinds
        there = set(running)
        found: list[int] = []
        waiting: list[int] = []
        for number in running:
            if kinds[number] is Fusing.NOTHING:
                found += waiting
                waiting = []
            alone = number in kept and kinds[number] is Fusing.POINTWISE
            if alone and there.isdisjoint(users[number]):
                waiting.append(number)
            else:
                found.append(number)
        return found + waiting

    def _forward_nodes(self, results: Iterable[int], known: Collection[int]) -> set[int]:
        """Return what forward runs for these results, without what is known to run."""
        nodes = self.problem.nodes
        found: set[int] = set()
        pending = list(results)
        while pending:
            number = pending.pop()
            if number not in found and number not in known and nodes[number].role is Role.FORWARD:
                found.add(number)
                pending += nodes[number].reads
        return found


def _mask(count: int, members: Iterable[int]) -> NDArray[np.bool_]:
    found = np.zeros(count, dtype=bool)
    found[list(members)] = True
    return found


class _Layout:
    """A problem as arrays: which storages each node touches and makes."""

    def __init__(self, problem: RecomputeProblem) -> None:
        nodes = problem.nodes
        self.problem = problem
        self.count = len(nodes)
        self.sizes = np.array(problem.sizes, dtype=np.int64)
        self.workspaces = np.array([node.workspace_bytes for node in nodes], dtype=np.int64)
        touched: list[tuple[int, int]] = []
        made: list[tuple[int, int]] = []
        for number, node in enumerate(nodes):
            storages = {*node.storages, *node.makes}
            if not node.picks:
                storages.update(s for read in node.reads for s in nodes[read].storages)
            touched += [(s, number) for s in storages]
            made += [(s, number) for s in node.makes]
        touched.sort()
        pairs = np.array(touched, dtype=np.int64).reshape(-1, 2)
        self.touching = pairs[:, 1]
        self.touched, self.starts = np.unique(pairs[:, 0], return_index=True)
        makes = np.array(made, dtype=np.int64).reshape(-1, 2)
        self.made, self.makers = makes[:, 0], makes[:, 1]
        self.ours = ~_mask(len(problem.sizes), problem.input_storages)

    @cached_property
    def kinds(self) -> list[Fusing]:
        """What a compiler makes of each node."""
        return [node.fusing for node in self.problem.nodes]

    @cached_property
    def own_kernel(self) -> NDArray[np.bool_]:
        """Whether a node is a kernel of its own."""
        return np.array([kind is Fusing.NOTHING for kind in self.kinds], dtype=bool)

    @cached_property
    def fuses(self) -> bool:
        """Whether any node may be computed inside of others."""
        return any(kind is Fusing.POINTWISE for kind in self.kinds)

    @cached_property
    def fusible(self) -> NDArray[np.bool_]:
        """Whether a node may be computed, or is looked through, inside of the kernels that read it.

        What a kernel of its own reads is memory in any case; if not here, because that one does not run, it
        is left as memory all the same where it is kept or computed again.
        """
        return np.array([kind in (Fusing.POINTWISE, Fusing.VIEW) for kind in self.kinds], dtype=bool)

    @cached_property
    def many_reads(self) -> list[bool]:
        """Whether a node reads so many tensors that it is not computed in several kernels."""
        return [len(set(node.reads)) > _MOST_FUSED_READS for node in self.problem.nodes]


class _GraphRun:
    """Nodes that run in an order, as one graph: which of them are fused into others, and the memory."""

    def __init__(self, layout: _Layout, order: Sequence[int] | Numbers, results: Iterable[int]) -> None:
        self._layout = layout
        self._order = np.array(order, dtype=np.int64)
        self._place = np.full(layout.count, -1, dtype=np.int64)
        self._place[self._order] = np.arange(len(order))
        self.fused: set[int] = set()
        self._last: dict[int, int] = {}
        """For each node that is read inside of kernels, and each view of one, the last of their places."""
        if layout.fuses:
            self._fuse(set(results))

    def peak(self, alive: NDArray[np.bool_], staying: NDArray[np.bool_]) -> int:
        """Return the most bytes alive: `alive` are storages that are there before, `staying` never go."""
        layout = self._layout
        sizes, steps = layout.sizes, len(self._order)
        begin = int(sizes[alive].sum())
        if not steps:
            return begin
        # What a fused node reads is read where it is computed.
        ends = self._place.copy()
        if self._last:
            ends[list(self._last)] = list(self._last.values())
        last = np.full(len(sizes), -1, dtype=np.int64)
        last[layout.touched] = np.maximum.reduceat(ends[layout.touching], layout.starts)
        born = self._place[layout.makers]
        if self.fused:
            written = np.ones(layout.count, dtype=bool)
            written[list(self.fused)] = False
            born = np.where(written[layout.makers], born, -1)
        here = born >= 0
        made, born = layout.made[here], born[here]
        change = np.zeros(steps + 1, dtype=np.int64)
        inside = layout.workspaces[self._order]
        again = alive[made]
        # A node with several results makes all of them anew, even those that are there.
        np.add.at(inside, born[again], sizes[made[again]])
        np.add.at(change, born[~again], sizes[made[~again]])
        ending = alive.copy()
        ending[made] = True
        ending &= ~staying & layout.ours & (last >= 0)
        np.add.at(change, last[ending] + 1, -sizes[ending])
        if self.fused:
            inside -= self._written_over(made[~again], born[~again], np.flatnonzero(ending), last)
        memory = begin + np.cumsum(change[:-1])
        return max(begin, int((memory + inside).max()))

    def _written_over(self, made: Numbers, born: Numbers, ending: Numbers, last: Numbers) -> Numbers:
        """Return for each step the bytes that are written over.

        A fused kernel puts its result where another value of the same size was that it is the last to read.
        """
        layout = self._layout
        own = layout.own_kernel[self._order[born]]
        most = int(layout.sizes.max()) + 1
        # One number for a step and a size, so that equal ones meet.
        results, counts = np.unique(born[~own] * most + layout.sizes[made[~own]], return_counts=True)
        ends, others = np.unique(last[ending] * most + layout.sizes[ending], return_counts=True)
        _, mine, theirs = np.intersect1d(results, ends, assume_unique=True, return_indices=True)
        found = np.zeros(len(self._order), dtype=np.int64)
        meeting = results[mine]
        np.add.at(found, meeting // most, np.minimum(counts[mine], others[theirs]) * (meeting % most))
        return found

    def _fuse(self, results: set[int]) -> None:
        """Find the pointwise nodes that are computed inside of the kernels that read them."""
        layout = self._layout
        users, kinds, many = layout.problem.users, layout.kinds, layout.many_reads
        kernels = np.concatenate(([0], np.cumsum(layout.own_kernel[self._order]))).tolist()
        place = self._place.tolist()
        fused, last = self.fused, self._last
        # For each node that may be read inside of kernels: the first place of such kernels.
        first: dict[int, int] = {}
        nothing, view, pointwise = Fusing.NOTHING, Fusing.VIEW, Fusing.POINTWISE
        for number in reversed(self._order[layout.fusible[self._order]].tolist()):
            if number in results:
                continue
            begin, end = NEVER, -1
            for user in users[number]:
                at = place[user]
                if at < 0:
                    continue
                kind = kinds[user]
                if kind is nothing:
                    end = -1
                    break
                if user in fused or kind is view:
                    if user not in first:
                        end = -1
                        break
                    begin, end = min(begin, first[user]), max(end, last[user])
                else:
                    begin, end = min(begin, at), max(end, at)
            if end < 0 or kernels[begin] != kernels[end]:
                continue
            if kinds[number] is pointwise:
                if begin != end and many[number]:
                    continue
                fused.add(number)
            first[number], last[number] = begin, end
