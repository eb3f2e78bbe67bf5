"""The cheapest way to have every needed value in backward, for one price per byte: a minimum cut.

Each value has two questions: is it needed in backward, and is it computed again? A value that is needed and
not computed again is kept, which costs its bytes times the price; computing it again costs its seconds and
makes its inputs needed. The cheapest answers are the smaller side of a minimum cut, found by augmenting
paths in levels (Dinic's algorithm).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from trainfit.planning.regions import Group


@dataclass(frozen=True)
class Choice:
    """Which groups are kept and which are computed again; the others are neither."""

    kept: frozenset[int]
    repeated: frozenset[int]
    bytes: int
    seconds: float


def cheapest(groups: list[Group], seconds_per_byte: float) -> Choice | None:
    """Return the choice with the least `seconds + bytes * price`; None if some value cannot be had at all."""
    network = _Network(2 * len(groups) + 2)
    source, sink = 2 * len(groups), 2 * len(groups) + 1
    for number, group in enumerate(groups):
        needed, repeated = 2 * number, 2 * number + 1
        if group.needed:
            network.connect(source, needed, math.inf)
        price = group.bytes * seconds_per_byte if group.keepable else math.inf
        network.connect(needed, repeated, price)
        network.connect(repeated, sink, group.seconds if group.repeatable else math.inf)
        network.connect(repeated, needed, math.inf)
        for read in group.inputs:
            network.connect(repeated, 2 * read, math.inf)
    if math.isinf(network.fill(source, sink)):
        return None
    reached = network.reached_from(source)
    kept = frozenset(n for n in range(len(groups)) if 2 * n in reached and 2 * n + 1 not in reached)
    repeated_groups = frozenset(n for n in range(len(groups)) if 2 * n + 1 in reached)
    return Choice(
        kept,
        repeated_groups,
        bytes=sum(groups[n].bytes for n in kept),
        seconds=sum(groups[n].seconds for n in repeated_groups),
    )


class _Network:
    """A flow network as parallel lists: edge `e` and its reverse `e ^ 1`."""

    def __init__(self, nodes: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(nodes)]
        self.heads: list[int] = []
        self.room: list[float] = []

    def connect(self, tail: int, head: int, capacity: float) -> None:
        self.edges[tail].append(len(self.heads))
        self.edges[head].append(len(self.heads) + 1)
        self.heads += (head, tail)
        self.room += (capacity, 0.0)

    def fill(self, source: int, sink: int) -> float:
        """Send as much as possible from source to sink, and return how much."""
        total = 0.0
        while True:
            levels = self._levels(source)
            if levels[sink] < 0:
                return total
            positions = [0] * len(self.edges)
            while (sent := self._send(source, sink, levels, positions)) > 0:
                total += sent
                if math.isinf(total):
                    return total

    def reached_from(self, source: int) -> set[int]:
        """Return the nodes that more could still be sent to."""
        return {node for node, level in enumerate(self._levels(source)) if level >= 0}

    def _levels(self, source: int) -> list[int]:
        levels = [-1] * len(self.edges)
        levels[source] = 0
        queue = deque([source])
        while queue:
            node = queue.popleft()
            for edge in self.edges[node]:
                if self.room[edge] > _LEAST and levels[self.heads[edge]] < 0:
                    levels[self.heads[edge]] = levels[node] + 1
                    queue.append(self.heads[edge])
        return levels

    def _send(self, source: int, sink: int, levels: list[int], positions: list[int]) -> float:
        """Send along one path of rising levels; 0 if there is none left."""
        path: list[int] = []
        node = source
        while node != sink:
            for position in range(positions[node], len(self.edges[node])):
                edge = self.edges[node][position]
                if self.room[edge] > _LEAST and levels[self.heads[edge]] == levels[node] + 1:
                    positions[node] = position
                    path.append(edge)
                    node = self.heads[edge]
                    break
            else:
                positions[node] = len(self.edges[node])
                if not path:
                    return 0.0
                node = self.heads[path.pop() ^ 1]
                positions[node] += 1
        amount = min(self.room[edge] for edge in path)
        for edge in path:
            if not math.isinf(self.room[edge]):
                self.room[edge] -= amount
            self.room[edge ^ 1] += amount
        return amount


_LEAST = 1e-15
"""Seconds: less than this is rounding."""
