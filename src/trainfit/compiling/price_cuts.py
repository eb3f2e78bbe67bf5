"""The cheapest choice at a price, part by part: what is given divides a problem; part of the compiled core.

Parts that are the same (repeated blocks) are solved once.
"""

from __future__ import annotations

from trainfit.compiling.graph_rows import GraphRows
from trainfit.compiling.price_network import UNLIMITED, PricedPart, PriceNetwork


class CutPart:
    """One part: its network, and its nodes in the order of the network's places."""

    def __init__(self, network: PriceNetwork, numbers: list[int]) -> None:
        """Take both."""
        self.network = network
        self.numbers = numbers


class PriceCuts:
    """Answers for one problem: the cheapest choice at a price, with some values given."""

    def __init__(
        self, rows: GraphRows, seconds: list[float], stands_for: list[int], wanted: list[int]
    ) -> None:
        """Take what running each node again costs, and which node is needed when a view is (-1: none)."""
        self._rows = rows
        self._seconds = seconds
        self._useful = [n for n in rows.useful if stands_for[n] == n]
        self._reads: list[list[int]] = [[] for _ in range(rows.count)]
        """Without repetition; nothing of what cannot run again."""
        for number in self._useful:
            if rows.repeatable[number]:
                mine = self._reads[number]
                for read in rows.reads[number]:
                    needed = stands_for[read]
                    if needed >= 0 and needed not in mine:
                        mine.append(needed)
        self._wanted = [False] * rows.count
        for number in wanted:
            if stands_for[number] >= 0:
                self._wanted[stands_for[number]] = True
        self._networks: dict[tuple[object, ...], PriceNetwork] = {}
        self._parts: dict[frozenset[int], list[CutPart]] = {}

    def cheapest(
        self, seconds_per_byte: float, given: frozenset[int], once: frozenset[int]
    ) -> list[int] | None:
        """Return the nodes to keep at a price, `given` kept for nothing; None if backward cannot have all.

        What is in `once` must not run again.
        """
        if given not in self._parts:
            self._parts[given] = self._divided(given)
        found: list[int] = []
        for part in self._parts[given]:
            forbidden: tuple[int, ...] = ()
            # Most parts have none of them, and are known.
            if once:
                forbidden = tuple([at for at in range(len(part.numbers)) if part.numbers[at] in once])
            kept = part.network.cheapest(seconds_per_byte, forbidden)
            if kept is None:
                return None
            for place in kept:
                found.append(part.numbers[place])
        return found

    def _divided(self, given: frozenset[int]) -> list[CutPart]:
        """Return the parts into which what is given divides the problem."""
        parent = [-1] * self._rows.count
        for number in self._useful:
            if number not in given:
                parent[number] = number
        for number in self._useful:
            if parent[number] < 0:
                continue
            for read in self._reads[number]:
                if parent[read] >= 0:
                    parent[_root(parent, number)] = _root(parent, read)
        parts: dict[int, list[int]] = {}
        for number in self._useful:
            if parent[number] >= 0:
                parts.setdefault(_root(parent, number), []).append(number)
        found: list[CutPart] = []
        place = [-1] * self._rows.count
        for numbers in parts.values():
            for number in numbers:
                if self._wanted[number]:
                    found.append(CutPart(self._network(numbers, place), numbers))
                    break
        return found

    def _network(self, numbers: list[int], place: list[int]) -> PriceNetwork:
        """Return the network of these nodes, the one of other nodes that are alike if there is one."""
        rows = self._rows
        for at in range(len(numbers)):
            place[numbers[at]] = at
        key: list[object] = []
        part = PricedPart([], [], [], [])
        for number in numbers:
            part.seconds.append(self._seconds[number] if rows.repeatable[number] else UNLIMITED)
            part.sizes.append(rows.own_bytes[number] if rows.keepable[number] else -1)
            part.wanted.append(self._wanted[number])
            part.reads.append([place[read] for read in self._reads[number] if place[read] >= 0])
            key.append(tuple(part.reads[-1]))
        for number in numbers:
            place[number] = -1
        asked = (tuple(part.seconds), tuple(part.sizes), tuple(part.wanted), tuple(key))
        if asked not in self._networks:
            self._networks[asked] = PriceNetwork(part)
        return self._networks[asked]


def _root(parent: list[int], number: int) -> int:
    while parent[number] != number:
        parent[number] = parent[parent[number]]
        number = parent[number]
    return number
