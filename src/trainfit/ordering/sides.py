"""The two ends of an order, from which a search can work: the beginning, and the end in reverse.

From either end nodes are taken away one at a time, and what is left in the middle shrinks. Sets of nodes are
bits of an integer; `taken` is what this end has taken.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.ordering.problem import Problem


class Masks:
    """The sets that both ends ask for, as integers."""

    def __init__(self, problem: Problem) -> None:
        """Make them once: with n nodes each has n bits."""
        self.predecessors = [bits(nodes) for nodes in problem.predecessors]
        self.successors = [bits(nodes) for nodes in problem.successors]
        members = [bits(nodes) for nodes in problem.members]
        self.blocks = [tuple((members[b], problem.freed[b]) for b in blocks) for blocks in problem.blocks]


def both_sides(problem: Problem) -> tuple[Side, Side]:
    """Return the beginning and the end of a problem."""
    masks = Masks(problem)
    return Side(problem, masks, from_end=False), Side(problem, masks, from_end=True)


class Side:
    """What taking a node from one end means: when that is possible, and what it does to memory."""

    def __init__(self, problem: Problem, masks: Masks, *, from_end: bool) -> None:
        """Look at a problem from one end."""
        self.problem = problem
        self.from_end = from_end
        self.start_bytes = problem.final_bytes if from_end else problem.initial_bytes
        self.released = problem.predecessors if from_end else problem.successors
        self.required = masks.successors if from_end else masks.predecessors
        self._blocks = masks.blocks

    def growth(self, node: int, taken: int) -> int:
        """Return by how much memory at the border rises when the node is taken next."""
        if self.from_end:
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
        return self.problem.rise[node] + (memory + growth if self.from_end else memory)

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
