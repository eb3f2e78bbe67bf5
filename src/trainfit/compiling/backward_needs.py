"""What backward needs of forward for a choice of kept values: what runs again, and before which nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from trainfit.compiling.recompute_problem import RecomputeProblem

NEVER = 2**40
"""A place behind all places."""

Numbers = NDArray[np.int64]


def needed_again(problem: RecomputeProblem, chosen: Collection[int]) -> tuple[set[int], set[int]] | None:
    """Return which of the chosen nodes backward reads, and which others it has to run again."""
    found = BackwardNeeds(problem).needed(chosen)
    return None if found is None else (set(found[0]), set(found[1]))


class BackwardNeeds:
    """What backward needs of forward for a choice, and where in backward: one way through forward."""

    def __init__(self, problem: RecomputeProblem) -> None:
        """Find where backward itself reads each node, which does not depend on a choice."""
        nodes, useful = problem.nodes, set(problem.useful)
        place = {number: at for at, number in enumerate(problem.backward_nodes)}
        first = {number: len(place) + at for at, number in enumerate(problem.backward_outputs)}
        self._first = [NEVER] * len(nodes)
        """For each node the first place in backward that reads it itself."""
        for number in problem.useful:
            read = (place[user] for user in problem.users[number] if user in place)
            self._first[number] = min(read, default=NEVER)
            self._first[number] = min(self._first[number], first.get(number, NEVER))
        self._nodes = [
            (n, nodes[n].keepable, nodes[n].repeatable, tuple({r for r in nodes[n].reads if r in useful}))
            for n in reversed(problem.useful)
        ]
        self._own = np.array(problem.backward_nodes, dtype=np.int64)
        self._stride = len(nodes) + 1
        # A node of backward comes after all that are computed again for it.
        self._own_keys = np.arange(len(self._own), dtype=np.int64) * self._stride + self._stride - 1

    def needed(self, chosen: Collection[int]) -> tuple[list[int], list[int], list[int]] | None:
        """Return what is kept, what runs again, and before which place of backward; the last nodes first.

        None if something is needed that cannot run again.
        """
        # Whoever reads a node has a higher number, so that it is known by then when it is needed.
        when = self._first.copy()
        kept: list[int] = []
        repeated: list[int] = []
        places: list[int] = []
        for number, keepable, repeatable, reads in self._nodes:
            at = when[number]
            if at == NEVER:
                continue
            if keepable and number in chosen:
                kept.append(number)
            elif repeatable:
                repeated.append(number)
                places.append(at)
                for read in reads:
                    if at < when[read]:
                        when[read] = at
            else:
                return None
        return kept, repeated, places

    def order(self, repeated: Sequence[int], places: Sequence[int]) -> Numbers:
        """Return what backward runs: each node computed again just before the first that needs it."""
        numbers = np.array(repeated, dtype=np.int64)
        keys = np.concatenate((np.array(places, dtype=np.int64) * self._stride + numbers, self._own_keys))
        keys.sort()
        at, number = keys // self._stride, keys % self._stride
        own = number == self._stride - 1
        number[own] = self._own[at[own]]
        return number
