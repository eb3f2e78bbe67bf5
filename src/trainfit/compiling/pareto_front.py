"""Partitions that no other beats in two figures: as they are found, in order."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable

from trainfit.compiling.recompute_problem import Partition


class ParetoFront:
    """The partitions with the fewest seconds for a size in bytes: the smallest first, the fastest last."""

    def __init__(self, size: Callable[[Partition], float]) -> None:
        """Begin with none; `size` is what is compared besides seconds."""
        self.partitions: list[Partition] = []
        self._size = size
        self._sizes: list[float] = []

    def copy(self) -> ParetoFront:
        """Return the same, to which others may be added."""
        found = ParetoFront(self._size)
        found.partitions, found._sizes = self.partitions.copy(), self._sizes.copy()
        return found

    def add(self, partition: Partition) -> None:
        """Take a partition if no other beats it, and drop those that it beats.

        Of equal ones that one stays whose kept nodes have the lower numbers, whichever came first.
        """
        size = self._size(partition)
        at = bisect.bisect_right(self._sizes, size)
        if at:
            before = self.partitions[at - 1]
            if before.seconds < partition.seconds:
                return
            if before.seconds == partition.seconds and (
                self._sizes[at - 1] < size or before.kept <= partition.kept
            ):
                return
            if self._sizes[at - 1] == size:
                at -= 1
        end = at
        while end < len(self.partitions) and self.partitions[end].seconds >= partition.seconds:
            end += 1
        self.partitions[at:end] = [partition]
        self._sizes[at:end] = [size]

    def fastest(self, most: float) -> Partition | None:
        """Return the fastest that is no larger."""
        at = bisect.bisect_right(self._sizes, most)
        return self.partitions[at - 1] if at else None

    def widest_gaps(self) -> list[Partition]:
        """Return pairs between which no partition is known, those with most bytes times seconds first."""
        pairs = list(itertools.pairwise(self.partitions))
        pairs.sort(
            key=lambda pair: (self._size(pair[0]) - self._size(pair[1])) * (pair[0].seconds - pair[1].seconds)
        )
        return [partition for pair in pairs for partition in pair]
