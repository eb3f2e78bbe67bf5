"""A `BufferGraph` as numbers, which is all that a search needs.

Memory after a set of nodes has run depends on the set alone, not on the order within it:

    memory(S) = initial + sum of `alloc` over S - sum of `freed` over the blocks whose members are all in S

where a block is released memory, and its members are the node that makes it and all that use it. While node v
runs after S, memory is memory(S) + rise[v]. The more has run, the more a further node releases (memory is
submodular in S): everything that the other files prove rests on that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainfit.ordering.graph import BufferGraph


@dataclass(frozen=True)
class OrderingProblem:
    """Nodes 0, 1, ... with what each adds and must follow, and blocks with what each releases."""

    rise: list[int]
    """Bytes above the memory before it while a node runs."""
    alloc: list[int]
    """Bytes that a node adds for good; the same as `rise` unless it stands for several nodes."""
    predecessors: list[tuple[int, ...]]
    successors: list[tuple[int, ...]]
    members: list[tuple[int, ...]]
    freed: list[int]
    blocks: list[tuple[int, ...]]
    """For each node the blocks of which it is a member."""
    initial_bytes: int

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return len(self.rise)

    @property
    def final_bytes(self) -> int:
        """Memory after everything has run."""
        return self.initial_bytes + sum(self.alloc) - sum(self.freed)


def make_problem(
    *,
    rise: Sequence[int],
    alloc: Sequence[int],
    predecessors: Sequence[Iterable[int]],
    blocks: Iterable[tuple[tuple[int, ...], int]],
    initial_bytes: int,
) -> OrderingProblem:
    """Build a problem from its parts; `blocks` are (sorted members, bytes), merged where members agree."""
    merged: dict[tuple[int, ...], int] = {}
    for members, size in blocks:
        if size:
            merged[members] = merged.get(members, 0) + size
    before = [tuple(sorted(set(nodes))) for nodes in predecessors]
    after: list[list[int]] = [[] for _ in before]
    for node, nodes in enumerate(before):
        for other in nodes:
            after[other].append(node)
    of_node: list[list[int]] = [[] for _ in before]
    for block, members in enumerate(merged):
        for node in members:
            of_node[node].append(block)
    return OrderingProblem(
        rise=list(rise),
        alloc=list(alloc),
        predecessors=before,
        successors=[tuple(nodes) for nodes in after],
        members=list(merged),
        freed=list(merged.values()),
        blocks=[tuple(numbers) for numbers in of_node],
        initial_bytes=initial_bytes,
    )


def problem_of(graph: BufferGraph) -> OrderingProblem:
    """Return the graph's problem; node and position in `graph.nodes` are the same number."""
    alloc = [0] * len(graph.nodes)
    users: list[list[int]] = [[] for _ in graph.buffers]
    for node, reads in enumerate(graph.reads):
        for read in reads:
            users[read].append(node)
    initial = 0
    blocks = []
    for number, buffer in enumerate(graph.buffers):
        producer = graph.producer[number]
        if producer < 0:
            initial += buffer.size_free
        else:
            alloc[producer] += buffer.size_alloc
            users[number].append(producer)
        if users[number] and not graph.kept[number]:
            blocks.append((tuple(sorted(set(users[number]))), buffer.size_free))
    return make_problem(
        rise=alloc, alloc=alloc, predecessors=graph.predecessors, blocks=blocks, initial_bytes=initial
    )


def step_bytes(problem: OrderingProblem, order: Sequence[int]) -> list[int]:
    """Return memory while each step of an order runs."""
    missing = [len(members) for members in problem.members]
    memory = problem.initial_bytes
    found = []
    for node in order:
        found.append(memory + problem.rise[node])
        memory += problem.alloc[node]
        for block in problem.blocks[node]:
            missing[block] -= 1
            if not missing[block]:
                memory -= problem.freed[block]
    return found


def peak_of(problem: OrderingProblem, order: Sequence[int]) -> int:
    """Return the most bytes alive at any time of an order."""
    return max(problem.initial_bytes, max(step_bytes(problem, order), default=0))


def is_possible(problem: OrderingProblem, order: Sequence[int]) -> bool:
    """Return whether an order has every node once, and each after its predecessors."""
    position = {node: step for step, node in enumerate(order)}
    if len(order) != problem.count or len(position) != problem.count:
        return False
    return all(position[before] < position[node] for node in order for before in problem.predecessors[node])
