"""Single values kept or let go of: what takes long in the place of others, and what lowers a peak."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

from trainfit.compiling.partition_memory import PartitionMemory
from trainfit.compiling.recompute_problem import GraphLimits, Partition

_MOST_LOWERED = 128
"""Kept values up to which they are let go of one by one."""
_TRIES = 4
"""How many values are tried, if to let go of the first does not lower the peak."""
_MORE, _FEWER, _DEAREST, _STEPS = 4, 2, 3, 8
"""Around a partition: how many values more, fewer, or in the place of how many others are tried."""

_SMALL_STEPS = 2
"""On the way from the fastest to the smallest: values with the fewest seconds that are let go of."""


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

    def lower(self, partition: Partition, *, per_byte: bool = True) -> Partition | None:
        """Let go of what costs the fewest seconds (per byte), if one of few tries lowers the peak."""
        for group in self._memory.relieving(partition, per_byte=per_byte)[:_TRIES]:
            found = self._judge(set(partition.kept).difference(group))
            if found is not None and found.peak_bytes <= partition.peak_bytes:
                return found
        return None

    def descend(self, partition: Partition, until: float, steps: int, *, per_byte: bool = True) -> None:
        """Let go of the first, the first two and so on, until the peak is low enough."""
        kept, lowest = set(partition.kept), partition
        for group in self._memory.relieving(partition, per_byte=per_byte)[:steps]:
            if lowest.peak_bytes <= until:
                return
            found = self._judge(kept.difference(group))
            if found is not None and found.peak_bytes <= lowest.peak_bytes:
                kept, lowest = kept.difference(group), found

    def go_down(self, partition: Partition) -> None:
        """Let go of one value after the other, from a fast partition on, as long as that lowers the peak.

        In large graphs it is several at once.
        """
        together = 1 + len(partition.kept) // _MOST_LOWERED
        lower: Partition | None = partition
        while lower is not None:
            partition = lower
            # What is small fits where the next one would not.
            if together == 1:
                self.descend(partition, 0, _SMALL_STEPS, per_byte=False)
            lower = self._without_several(partition, together) or self.lower(partition)

    def _without_several(self, partition: Partition, together: int) -> Partition | None:
        if together == 1:
            return None
        groups = self._memory.relieving(partition)[:together]
        found = self._judge(set(partition.kept).difference(*groups))
        return found if found is not None and found.peak_bytes < partition.peak_bytes else None

    def try_around(self, partition: Partition) -> None:
        """Try what is like a partition: a value more or fewer, and some in the place of others."""
        nodes, kept = self._memory.problem.nodes, set(partition.kept)
        worth = self._memory.worth_keeping(partition)
        for number in worth[:_MORE]:
            self._judge(kept | {number})
        for group in self._memory.relieving(partition)[:_FEWER]:
            self._judge(kept.difference(group))
        self.descend(partition, 0, _STEPS, per_byte=False)
        for number in sorted(worth, key=lambda n: -nodes[n].seconds)[:_DEAREST]:
            more = self._judge(kept | {number})
            if more is not None and more.seconds < partition.seconds:
                self.descend(more, partition.peak_bytes, _STEPS)

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
