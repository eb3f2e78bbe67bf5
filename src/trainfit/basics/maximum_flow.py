"""The largest flow through a network, by augmenting paths in levels (Dinic, 1970), and the cut it leaves.

Capacities are whole numbers or floats, or `UNLIMITED`. Whole numbers are exact, however large. Floats are
rounded, so that a network of them says how much counts as nothing (`rounding`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

UNLIMITED = math.inf


class FlowNetwork:
    """Edges as parallel lists: edge `e` and its reverse `e ^ 1`."""

    def __init__(self, nodes: int, rounding: float = 0) -> None:
        """Make a network of that many nodes, without edges."""
        self.edges: list[list[int]] = [[] for _ in range(nodes)]
        self.heads: list[int] = []
        self.room: list[float] = []
        self.sent: float = 0
        self.work = 0
        """How many edges have been looked at: the same on every machine, unlike time."""
        self._least = rounding

    def connect(self, tail: int, head: int, capacity: float) -> None:
        """Add an edge."""
        self.edges[tail].append(len(self.heads))
        self.edges[head].append(len(self.heads) + 1)
        self.heads += (head, tail)
        self.room += (capacity, 0)

    def with_more(self, more: Iterable[tuple[int, float]]) -> FlowNetwork:
        """Return the network with what was sent, and more capacity on some edges: filling it goes on."""
        found = FlowNetwork(0, self._least)
        found.edges, found.heads = self.edges, self.heads
        found.room, found.sent = self.room.copy(), self.sent
        for edge, capacity in more:
            found.room[edge] += capacity
        return found

    def fill(self, source: int, sink: int, most_work: float = UNLIMITED) -> None:
        """Send as much as possible, or less if that takes more than `most_work`.

        What was sent is `sent`; it is `UNLIMITED` if some path has no limit.
        """
        while self.work <= most_work and self.sent < UNLIMITED:
            levels = self._levels(source, sink)
            if levels[sink] < 0:
                return
            self._fill_levels(source, sink, levels, most_work)

    def reached_from(self, source: int) -> list[bool]:
        """Return which nodes more could still be sent to: the smallest source side of a minimum cut."""
        return [level >= 0 for level in self._levels(source, -1)]

    def _levels(self, source: int, sink: int) -> list[int]:
        levels = [-1] * len(self.edges)
        levels[source] = 0
        frontier = [source]
        heads, room, least = self.heads, self.room, self._least
        depth = 0
        while frontier and (sink < 0 or levels[sink] < 0):
            depth += 1
            following = []
            for node in frontier:
                self.work += len(self.edges[node])
                for edge in self.edges[node]:
                    head = heads[edge]
                    if levels[head] < 0 and room[edge] > least:
                        levels[head] = depth
                        following.append(head)
            frontier = following
        return levels

    def _fill_levels(self, source: int, sink: int, levels: list[int], most_work: float) -> None:
        """Send along paths of rising levels until there is none left."""
        heads, room, edges, least = self.heads, self.room, self.edges, self._least
        positions = [0] * len(edges)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                amount = min([room[edge] for edge in path])
                self.sent += amount
                if amount == UNLIMITED:
                    return
                # Continue from the first edge that is full now.
                cut = len(path)
                for place in range(len(path) - 1, -1, -1):
                    edge = path[place]
                    room[edge] -= amount
                    room[edge ^ 1] += amount
                    if room[edge] <= least:
                        cut = place
                node = heads[path[cut] ^ 1]
                del path[cut:]
                self.work += len(path) + 1
                if self.work > most_work:
                    return
            outgoing, deeper = edges[node], levels[node] + 1
            place = positions[node]
            while place < len(outgoing):
                edge = outgoing[place]
                if room[edge] > least and levels[heads[edge]] == deeper:
                    break
                place += 1
            self.work += place - positions[node] + 1
            positions[node] = place
            if place < len(outgoing):
                path.append(outgoing[place])
                node = heads[outgoing[place]]
            elif path:
                node = heads[path.pop() ^ 1]
                positions[node] += 1
            else:
                return
