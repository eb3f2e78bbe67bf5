"""The cheapest way to have every needed value in backward, for one price per byte: a minimum cut.

A group of ops makes values (storages). Each value has a question: is it needed in backward? Each group has
one: is it computed again? A value that is needed, of a group that is not computed again, is kept, which costs
its bytes times the price. Computing a group again costs its seconds and makes what it reads needed. The
cheapest answers are the smaller side of a minimum cut, found by augmenting paths in levels (Dinic's
algorithm).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

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
    first_value = list(accumulate((len(group.sizes) for group in groups), initial=len(groups)))
    source, sink = first_value[-1], first_value[-1] + 1
    network = _Network(first_value[-1] + 2)
    for repeated, group in enumerate(groups):
        network.connect(repeated, sink, group.seconds if group.repeatable else math.inf)
        for place, (size, saved) in enumerate(zip(group.sizes, group.saved)):
            value = first_value[repeated] + place
            if saved:
                network.connect(source, value, math.inf)
            network.connect(value, repeated, size * seconds_per_byte if group.keepable else math.inf)
        for maker, place in group.reads:
            network.connect(repeated, first_value[maker] + place, math.inf)
    if math.isinf(network.fill(source, sink)):
        return None
    reached = network.reached_from(source)
    return choice_of(groups, frozenset(n for n in range(len(groups)) if n in reached))


def choice_of(groups: list[Group], repeated: frozenset[int]) -> Choice:
    """Return the choice that computes these groups again, and keeps what else is needed."""
    needed = {
        (n, place) for n, group in enumerate(groups) for place, saved in enumerate(group.saved) if saved
    }
    needed = needed.union(*(groups[n].reads for n in repeated))
    kept = {(n, place) for n, place in needed if n not in repeated}
    return Choice(
        frozenset(n for n, _ in kept),
        repeated,
        bytes=sum(groups[n].sizes[place] for n, place in kept),
        seconds=sum(groups[n].seconds for n in repeated),
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
