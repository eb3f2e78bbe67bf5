"""Single values kept or let go of: what takes long in the place of others, and what lowers a peak."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

from trainfit.compiling.partition_memory import PartitionMemory
from trainfit.compiling.recompute_problem import GraphLimits, Partition


class PartitionSwaps:
    """Tries swaps in partitions of one problem; `judge` says what a choice needs and takes."""

    def __init__(
        self,
        memory: PartitionMemory,
        judge: Callable[[Collection[int]], Partition | None],
        moves: int,
    ) -> None:
        """Prepare to try as many as the moves allow that a search has."""
        self._memory, self._judge, self._moves = memory, judge, moves

    def swapped(self, best: Partition, limits: GraphLimits) -> Partition:
        """Keep what takes long to compute again in the place of as little else as possible."""
        nodes = self._memory.problem.nodes
        able = [n for n in self._memory.again(best) if nodes[n].keepable]
        for number in sorted(able, key=lambda n: (-nodes[n].seconds, n))[: max(self._moves // 8, 1)]:
            more = self._judge({*best.kept, number})
            if more is None or more.seconds >= best.seconds:
                continue
            for made in (self._least_worth_out(more, number, limits), self._peak_out(more, number, limits)):
                if made is not None and made.seconds < best.seconds:
                    best = made
        return best

    def _least_worth_out(self, more: Partition, number: int, limits: GraphLimits) -> Partition | None:
        """Let go of others than `number`, the least worth first, until it fits."""
        rest = [n for n in reversed(self._memory.least_worth_keeping(more)) if n != number]
        found: Partition | None = more
        # The less is kept, the more may be alive at once later: one by one.
        for _ in range(min(len(rest), self._moves // 4)):
            if found is None or found.excess(limits) <= 0:
                break
            found = self._judge({number, *rest[:-1]})
            rest.pop()
        return found if found is not None and found.excess(limits) <= 0 else None

    def _peak_out(self, more: Partition, number: int, limits: GraphLimits) -> Partition | None:
        """Let go of others than `number` until it fits: each time the least worth one that lowers the peak.

        Most are not alive at the peak, and to let go of them would be for nothing.
        """
        tries = max(self._moves // 4, 1)
        while more.excess(limits) > 0:
            others = (n for n in self._memory.least_worth_keeping(more) if n != number)
            smaller = None
            for other in itertools.islice(others, tries):
                tries -= 1
                found = self._judge(set(more.kept) - {other})
                if found is not None and found.excess(limits) < more.excess(limits):
                    smaller = found
                    break
            if smaller is None:
                return None
            more = smaller
        return more

    def smaller(self, best: Partition, limits: GraphLimits) -> Partition | None:
        """Let go of or keep single values where no cut is within the limits, while that lowers the peak."""
        for number in self._memory.least_worth_keeping(best)[: self._moves]:
            if best.excess(limits) <= 0:
                break
            found = self._judge(set(best.kept) - {number})
            if found is not None and found.excess(limits) < best.excess(limits):
                best = found
        for number in self._memory.worth_keeping(best)[: self._moves]:
            if best.excess(limits) <= 0:
                break
            found = self._judge({*best.kept, number})
            if found is not None and found.excess(limits) < best.excess(limits):
                best = found
        return best if best.excess(limits) <= 0 else None
