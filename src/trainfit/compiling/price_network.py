"""The cheapest choice of kept values of one part of a problem, for one price per byte.

Part of the compiled core. A minimum cut, by augmenting paths in levels (Dinic, 1970), with floats alone,
unlike `maximum_flow.py`.
"""

from __future__ import annotations

ROUNDING = 1e-16
"""Seconds: less than this is rounding."""
LEAST_SECONDS = 1e-13
"""Of running anything again: of equally cheap choices the one that runs less."""
UNLIMITED = float("inf")


class PricedPart:
    """What a network is made of: for each node its seconds, bytes, whether it is wanted, what it reads."""

    def __init__(
        self, seconds: list[float], sizes: list[int], wanted: list[bool], reads: list[list[int]]
    ) -> None:
        """Take the columns: no end of seconds where it must not run again, -1 bytes if it is not kept."""
        self.seconds = seconds
        self.sizes = sizes
        self.wanted = wanted
        self.reads = reads


class FilledNetwork:
    """The room that is left on each edge at one price, and what was sent."""

    def __init__(self, price: float, room: list[float], sent: float) -> None:
        """Take both."""
        self.price = price
        self.room = room
        self.sent = sent


class PriceNetwork:
    """One part of a problem. Edge `e` and its reverse are `e` and `e ^ 1`."""

    def __init__(self, part: PricedPart) -> None:
        """Connect nodes that run again with what they read, and values with what computes them."""
        self._count = count = len(part.seconds)
        self._source, self._sink = 2 * count, 2 * count + 1
        self._edges: list[list[int]] = [[] for _ in range(2 * count + 2)]
        self._heads: list[int] = []
        room: list[float] = []
        self._priced: list[int] = []
        self._sizes: list[float] = []
        self._running: list[int] = []
        """For each node the edge that costs its seconds."""
        unlimited = UNLIMITED
        for again in range(count):
            needed = count + again
            self._running.append(len(self._heads))
            self._connect(again, self._sink, part.seconds[again] + LEAST_SECONDS, room)
            if part.wanted[again]:
                self._connect(self._source, needed, unlimited, room)
            if part.sizes[again] >= 0:
                self._priced.append(len(self._heads))
                self._sizes.append(float(part.sizes[again]))
                self._connect(needed, again, 0.0, room)
            else:
                self._connect(needed, again, unlimited, room)
            for read in part.reads[again]:
                self._connect(again, count + read, unlimited, room)
        self._filled = [FilledNetwork(0.0, room, 0.0)]
        """At rising prices."""
        self._known: dict[tuple[float, tuple[int, ...]], list[int] | None] = {}

    def _connect(self, tail: int, head: int, capacity: float, room: list[float]) -> None:
        self._edges[tail].append(len(self._heads))
        self._edges[head].append(len(self._heads) + 1)
        self._heads.append(head)
        self._heads.append(tail)
        room.append(capacity)
        room.append(0.0)

    def cheapest(self, seconds_per_byte: float, once: tuple[int, ...]) -> list[int] | None:
        """Return the places of the nodes to keep; None if something that is wanted cannot be had.

        The nodes at the places `once` must not run again.
        """
        asked = seconds_per_byte, once
        if asked not in self._known:
            self._known[asked] = self._found(seconds_per_byte, once)
        return self._known[asked]

    def _found(self, seconds_per_byte: float, once: tuple[int, ...]) -> list[int] | None:
        unlimited = UNLIMITED
        filled = self._at(seconds_per_byte)
        if once and filled.sent < unlimited:
            filled = FilledNetwork(filled.price, filled.room.copy(), filled.sent)
            for place in once:
                filled.room[self._running[place]] += unlimited
            self._fill(filled)
        if filled.sent >= unlimited:
            return None
        count = self._count
        levels = self._levels(filled.room, False)
        return [n for n in range(count) if levels[count + n] >= 0 and levels[n] < 0]

    def _at(self, seconds_per_byte: float) -> FilledNetwork:
        """Return the network filled at a price, from the one at the next lower price that is known."""
        at = len(self._filled)
        while self._filled[at - 1].price > seconds_per_byte:
            at -= 1
        before = self._filled[at - 1]
        if before.price == seconds_per_byte:
            return before
        more = seconds_per_byte - before.price
        filled = FilledNetwork(seconds_per_byte, before.room.copy(), before.sent)
        room = filled.room
        for place in range(len(self._priced)):
            room[self._priced[place]] += self._sizes[place] * more
        self._fill(filled)
        if filled.sent < UNLIMITED:
            self._filled.insert(at, filled)
        return filled

    def _fill(self, filled: FilledNetwork) -> None:
        """Send as much as possible; what was sent is without end if some path has no limit."""
        unlimited = UNLIMITED
        while filled.sent < unlimited:
            levels = self._levels(filled.room, True)
            if levels[self._sink] < 0:
                return
            self._fill_levels(filled, levels)

    def _levels(self, room: list[float], to_sink: bool) -> list[int]:
        """Return how many edges with room each node is from the source; -1: it cannot be reached."""
        edges, heads, least = self._edges, self._heads, ROUNDING
        sink = self._sink
        levels = [-1] * len(edges)
        levels[self._source] = 0
        frontier = [self._source]
        depth = 0
        while frontier and not (to_sink and levels[sink] >= 0):
            depth += 1
            following: list[int] = []
            for node in frontier:
                for edge in edges[node]:
                    head = heads[edge]
                    if levels[head] < 0 and room[edge] > least:
                        levels[head] = depth
                        following.append(head)
            frontier = following
        return levels

    def _fill_levels(self, filled: FilledNetwork, levels: list[int]) -> None:
        """Send along paths of rising levels until there is none left."""
        room, edges, heads = filled.room, self._edges, self._heads
        source, sink, least, unlimited = self._source, self._sink, ROUNDING, UNLIMITED
        positions = [0] * len(edges)
        path: list[int] = []
        node = source
        while True:
            if node == sink:
                amount = unlimited
                for edge in path:
                    if room[edge] < amount:
                        amount = room[edge]
                filled.sent += amount
                if amount == unlimited:
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
            outgoing = edges[node]
            deeper = levels[node] + 1
            place = positions[node]
            count = len(outgoing)
            while place < count:
                edge = outgoing[place]
                if room[edge] > least and levels[heads[edge]] == deeper:
                    break
                place += 1
            positions[node] = place
            if place < count:
                path.append(outgoing[place])
                node = heads[outgoing[place]]
            elif path:
                node = heads[path.pop() ^ 1]
                positions[node] += 1
            else:
                return
