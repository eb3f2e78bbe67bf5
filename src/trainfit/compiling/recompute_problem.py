"""`RecomputeProblem`: a joint graph as plain data, of which any forward value may be kept or computed again.

Nodes are numbers in the order of the graph. A node reads other nodes, and its result lies in storages, which
it makes or shares (views). What depends on a gradient from outside is backward, everything else forward. A
value that backward needs is kept from forward, or computed again in backward from what is kept. Values of
inputs are always there.

What a choice costs and needs is asked of `partition_memory.py`; which choice is best, of
`partition_search.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property


class Role(enum.Enum):
    """What a node is in the joint graph."""

    INPUT = "input"
    """Given to forward: parameters, buffers, the batch."""
    TANGENT = "tangent"
    """Given to backward: the gradients of forward's outputs."""
    FORWARD = "forward"
    BACKWARD = "backward"


class Fusing(enum.Enum):
    """What a compiler that fuses makes of a node."""

    NOTHING = "nothing"
    """A kernel of its own, or no compiler that fuses: reads memory and writes memory."""
    VIEW = "view"
    """No kernel at all."""
    POINTWISE = "pointwise"
    """Is computed inside of the kernels that read it, if those are near."""
    REDUCTION = "reduction"
    """Computes what it reads inside of its own kernel, but its result is memory."""


@dataclass(frozen=True, slots=True)
class ProblemNode:
    """One node of a joint graph."""

    name: str
    role: Role
    reads: tuple[int, ...] = ()
    storages: tuple[int, ...] = ()
    """The storages of its result, its own or others'."""
    makes: tuple[int, ...] = ()
    """Those of them that it allocates."""
    seconds: float = 0.0
    """What running it again would add."""
    workspace_bytes: int = 0
    """What its kernel allocates besides, while it runs."""
    repeatable: bool = True
    """Whether running it again gives the same and does nothing else."""
    keepable: bool = True
    """Whether its result can be handed from forward to backward."""
    picks: bool = False
    """Whether it only takes one of several results of what it reads."""
    fusing: Fusing = Fusing.NOTHING


@dataclass(frozen=True)
class RecomputeProblem:
    """The nodes of a joint graph, the bytes of all storages, and what forward and backward return."""

    nodes: tuple[ProblemNode, ...]
    sizes: tuple[int, ...]
    forward_outputs: tuple[int, ...]
    backward_outputs: tuple[int, ...]

    @cached_property
    def backward_nodes(self) -> tuple[int, ...]:
        """The nodes that depend on a tangent, in order, without the tangents."""
        return tuple(n for n, node in enumerate(self.nodes) if node.role is Role.BACKWARD)

    @cached_property
    def input_storages(self) -> frozenset[int]:
        """The storages that the caller owns, whatever happens."""
        return frozenset(s for node in self.nodes if node.role is Role.INPUT for s in node.storages)

    @cached_property
    def output_storages(self) -> frozenset[int]:
        """The storages that forward returns and that are not the caller's already."""
        found = {s for n in self.forward_outputs for s in self.nodes[n].storages}
        return frozenset(found - self.input_storages)

    @cached_property
    def wanted(self) -> tuple[int, ...]:
        """The forward nodes whose values backward reads or returns, in order."""
        found = {n for number in self.backward_nodes for n in self.nodes[number].reads}
        found |= set(self.backward_outputs)
        return tuple(sorted(n for n in found if self.nodes[n].role is Role.FORWARD))

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each node those that read it, in order."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for number, node in enumerate(self.nodes):
            for read in dict.fromkeys(node.reads):
                found[read].append(number)
        return tuple(tuple(numbers) for numbers in found)

    @cached_property
    def own_bytes(self) -> tuple[int, ...]:
        """For each node the bytes of its result's storages that are not the caller's."""
        return tuple(
            sum(self.sizes[storage] for storage in set(node.storages) - self.input_storages)
            for node in self.nodes
        )

    def behind_views(self, chosen: Iterable[int]) -> set[int]:
        """Return the same choice with what views are views of in their place: views are never kept."""
        found = set()
        for number in chosen:
            while not self.nodes[number].keepable and self.nodes[number].fusing is Fusing.VIEW:
                if not self.nodes[number].reads:
                    break
                number = self.nodes[number].reads[0]
            found.add(number)
        return found

    @cached_property
    def useful(self) -> tuple[int, ...]:
        """The forward nodes that backward may read, or need to compute again what it reads; in order."""
        found: set[int] = set()
        pending = list(self.wanted)
        while pending:
            number = pending.pop()
            if number not in found and self.nodes[number].role is Role.FORWARD:
                found.add(number)
                if self.nodes[number].repeatable:
                    pending += self.nodes[number].reads
        return tuple(sorted(found))


@dataclass(frozen=True)
class GraphLimits:
    """The bytes that one call of the graph may have alive above what its caller has: three limits."""

    forward_bytes: float
    held_bytes: float
    """Between forward and backward."""
    backward_bytes: float

    @staticmethod
    def same(limit: float) -> GraphLimits:
        """Return one limit for all of them."""
        return GraphLimits(limit, limit, limit)

    @property
    def are_same(self) -> bool:
        """Whether they are one limit."""
        return self.forward_bytes == self.held_bytes == self.backward_bytes

    def exceeded_by(self, forward_bytes: int, held_bytes: int, backward_bytes: int) -> float:
        """Return by how many bytes a call is above the limits; 0 or less: it is within."""
        return max(
            forward_bytes - self.forward_bytes,
            held_bytes - self.held_bytes,
            backward_bytes - self.backward_bytes,
        )


WhatRuns = Callable[[Sequence[int]], tuple[tuple[int, ...], tuple[int, ...]]]
"""Returns what runs again for what is kept, and the order of backward."""


@dataclass(frozen=True)
class Partition:
    """One choice: what is kept and what is computed again, and what comes of it."""

    kept: tuple[int, ...]
    """The nodes whose results cross from forward to backward, in order; without inputs."""
    seconds: float
    """What computing again adds."""
    kept_bytes: int
    held_bytes: int
    """The same with what forward returned, which its caller holds."""
    forward_peak_bytes: int
    """Above the inputs, which are the caller's."""
    backward_peak_bytes: int
    """The same, with what was kept, the tangents, and what forward returned."""
    what_runs: WhatRuns = field(repr=False, compare=False)

    @cached_property
    def _runs(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.what_runs(self.kept)

    @property
    def repeated(self) -> tuple[int, ...]:
        """The forward nodes that run again, in order."""
        return self._runs[0]

    @property
    def backward_order(self) -> tuple[int, ...]:
        """What backward runs: its own nodes and those computed again, each before its first need."""
        return self._runs[1]

    @property
    def peak_bytes(self) -> int:
        """The most of forward and backward."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    def excess(self, limits: GraphLimits) -> float:
        """Return by how many bytes it is above its limits; 0 or less: it is within."""
        return limits.exceeded_by(self.forward_peak_bytes, self.held_bytes, self.backward_peak_bytes)
