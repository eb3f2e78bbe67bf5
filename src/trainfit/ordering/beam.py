"""Orders within a limit, by keeping only the best few sets of nodes of every length.

Sets of the same length are compared by their memory. A node that adds no memory is taken at once, as in
`tighten.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from trainfit.ordering.directions import Direction, nodes_in


class Beam:
    """A beam search of one problem from one end; prepared once for several limits and widths."""

    def __init__(self, direction: Direction) -> None:
        """Start from one end of a problem."""
        self._direction = direction
        self._problem = direction.problem
        self.work = 0
        """How many moves have been looked at: the same on every machine, unlike time."""

    def search(
        self, limit: int, width: int, most_work: int, stop: Callable[[], bool] = lambda: False
    ) -> list[int] | None:
        """Return an order whose peak is at most `limit`, or None if none is found."""
        direction = self._direction
        if max(self._problem.initial_bytes, self._problem.final_bytes) > limit:
            return None
        stop_at = self.work + most_work
        level = [(direction.start_bytes, 0, direction.ready())]
        history: list[dict[int, int]] = []
        """For each length the sets that were kept, each with the node that was taken last."""
        for _ in range(self._problem.count):
            found: dict[int, tuple[int, int, int]] = {}
            for memory, taken, ready in level:
                self._expand(memory, taken, ready, limit, found)
            if not found or self.work > stop_at or stop():
                return None
            best = sorted((memory, taken) for taken, (memory, _, _) in found.items())[:width]
            level = []
            kept = {}
            for memory, taken in best:
                _, node, ready = found[taken]
                kept[taken] = node
                level.append((memory, *direction.take(node, taken & ~(1 << node), ready)))
            history.append(kept)
        return self._order(level[0][1], history) if history else []

    def _expand(
        self, memory: int, taken: int, ready: int, limit: int, found: dict[int, tuple[int, int, int]]
    ) -> None:
        """Note what can follow a set: the memory then, the node taken, and what could be taken before."""
        direction = self._direction
        moves = []
        for node in nodes_in(ready):
            growth = direction.growth(node, taken)
            self.work += 1
            if direction.needed(node, memory, growth) <= limit:
                if growth <= 0:
                    found[taken | 1 << node] = (memory + growth, node, ready)
                    return
                moves.append((memory + growth, node))
        for grown, node in moves:
            found[taken | 1 << node] = (grown, node, ready)

    def _order(self, taken: int, history: list[dict[int, int]]) -> list[int]:
        order = []
        for kept in reversed(history):
            node = kept[taken]
            order.append(node)
            taken &= ~(1 << node)
        return order if self._direction.backwards else order[::-1]
