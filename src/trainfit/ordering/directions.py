"""The two directions in which a search can build an order: forwards from its start, backwards from its end.

In either direction nodes are taken one at a time, and what is left between the two ends shrinks. Sets of
nodes are bits of an integer; `taken` is what has been taken in this direction.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.ordering.ordering_problem import OrderingProblem

Blocks = list[tuple[tuple[int, int], ...]]
"""For each node the members of its blocks, and what each block frees."""


def both_directions(problem: OrderingProblem) -> tuple[Direction, Direction]:
    """Return a problem as it looks forwards and backwards."""
    members = [bits(nodes) for nodes in problem.members]
    both = [tuple((members[b], problem.freed[b]) for b in blocks) for blocks in problem.blocks]
    return Direction(problem, both, backwards=False), Direction(problem, both, backwards=True)


class Direction:
    """What taking a node in one direction means: when that is possible, and what it does to memory."""

    def __init__(self, problem: OrderingProblem, blocks: Blocks, *, backwards: bool) -> None:
        """Look at a problem in one direction."""
        self.problem = problem
        self.backwards = backwards
        self.start_bytes = problem.final_bytes if backwards else problem.initial_bytes
        self.released = problem.predecessors if backwards else problem.successors
        required = problem.successors if backwards else problem.predecessors
        self.required = [bits(nodes) for nodes in required]
        self._blocks = blocks

    def growth(self, node: int, taken: int) -> int:
        """Return by how much memory at the border rises when the node is taken next."""
        if self.backwards:
            found = -self.problem.alloc[node]
            for members, freed in self._blocks[node]:
                if not members & taken:
                    found += freed
            return found
        open_nodes = ~(taken | 1 << node)
        found = self.problem.alloc[node]
        for members, freed in self._blocks[node]:
            if not members & open_nodes:
                found -= freed
        return found

    def needed(self, node: int, memory: int, growth: int) -> int:
        """Return memory while the node runs, with `memory` at the border before it is taken."""
        return self.problem.rise[node] + (memory + growth if self.backwards else memory)

    def take(self, node: int, taken: int, ready: int) -> tuple[int, int]:
        """Return what is taken and what can be taken after the node has been."""
        taken |= 1 << node
        ready &= ~(1 << node)
        required = self.required
        for other in self.released[node]:
            if not required[other] & ~taken:
                ready |= 1 << other
        return taken, ready

    def ready(self) -> int:
        """Return what can be taken first."""
        return bits([node for node, mask in enumerate(self.required) if not mask])


def bits(nodes: Sequence[int]) -> int:
    """Return a set of nodes as an integer."""
    if len(nodes) > _FEW:
        text = bytearray(max(nodes) // 8 + 1)
        for node in nodes:
            text[node >> 3] |= 1 << (node & 7)
        return int.from_bytes(text, "little")
    found = 0
    for node in nodes:
        found |= 1 << node
    return found


_FEW = 16


def nodes_in(mask: int) -> list[int]:
    """Return the nodes of a set that is an integer, in order."""
    found = []
    while mask:
        bit = mask & -mask
        found.append(bit.bit_length() - 1)
        mask ^= bit
    return found
