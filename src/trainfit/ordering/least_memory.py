"""The least memory that can be alive when a node runs, whatever the order: a minimum cut.

When a node runs, its ancestors have run and its descendants have not; about every other node there is a
choice. Running more of them adds what they allocate and releases the blocks whose members have then all run,
and each needs its own ancestors: the best choice is a maximum closure, which a minimum cut finds exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trainfit.basics.maximum_flow import UNLIMITED, FlowNetwork
from trainfit.ordering.ordering_problem import OrderingProblem


@dataclass(frozen=True)
class LeastMemory:
    """What memory before a node is never below, and how much work it took to find."""

    bytes: int
    work: int


def least_memory_before(
    problem: OrderingProblem,
    node: int,
    most_work: int,
    *,
    already_run: Iterable[int] = (),
    not_yet_run: Iterable[int] = (),
) -> LeastMemory | None:
    """Return the least memory in which `node` can begin, given that some nodes have run and others have not.

    None if that cannot be. A cut that takes more than `most_work` is left unfinished: its figure is lower.
    """
    inside = reachable(problem.predecessors, [node, *already_run]).union(already_run)
    excluded = reachable(problem.successors, [node, *not_yet_run]).union(not_yet_run, [node])
    if not inside.isdisjoint(excluded):
        return None
    memory = problem.initial_bytes + sum([problem.alloc[other] for other in inside])
    useful: list[int] = []
    for block, members in enumerate(problem.members):
        if excluded.isdisjoint(members):
            if inside.issuperset(members):
                memory -= problem.freed[block]
            else:
                useful.append(block)
    work = problem.count + len(problem.members)
    network, _ = _filled(problem, inside, useful, most_work - work)
    gain = sum(problem.freed[block] for block in useful) - int(network.sent)
    return LeastMemory(memory - gain, work + network.work)


def best_closure(problem: OrderingProblem, inside: set[int], choice: set[int]) -> set[int]:
    """Return what to run out of `choice` to have the least memory, when all of `inside` has run.

    Everything that the nodes of `choice` need is in `choice` or `inside`. Of several answers, the smallest.
    """
    blocks = dict.fromkeys(block for node in choice for block in problem.blocks[node])
    useful = [
        block for block in blocks if all(node in choice or node in inside for node in problem.members[block])
    ]
    network, numbers = _filled(problem, inside, useful)
    reached = network.reached_from(0)
    return {node for node, number in numbers.items() if reached[number]}


def reachable(neighbours: list[tuple[int, ...]], starts: Iterable[int]) -> set[int]:
    """Return all that can be reached from some nodes in at least one step."""
    found: set[int] = set()
    pending = list(starts)
    while pending:
        for other in neighbours[pending.pop()]:
            if other not in found:
                found.add(other)
                pending.append(other)
    return found


def _filled(
    problem: OrderingProblem, inside: set[int], useful: list[int], most_work: float = UNLIMITED
) -> tuple[FlowNetwork, dict[int, int]]:
    """Return the network of the blocks that could be released and of all that this would need, with its flow.

    Source to blocks (what they free), blocks to members, nodes to their needs, nodes to sink (alloc). With it
    come the numbers of the nodes. What is not sent is how much memory can fall: too much if the work is used
    up before the flow is.
    """
    numbers: dict[int, int] = {}
    pending = [member for block in useful for member in problem.members[block] if member not in inside]
    while pending:
        node = pending.pop()
        if node not in numbers:
            numbers[node] = 2 + len(useful) + len(numbers)
            pending += [before for before in problem.predecessors[node] if before not in inside]
    network = FlowNetwork(2 + len(useful) + len(numbers))
    for place, block in enumerate(useful, 2):
        network.connect(0, place, problem.freed[block])
        for member in problem.members[block]:
            if member in numbers:
                network.connect(place, numbers[member], UNLIMITED)
    for node, number in numbers.items():
        if problem.alloc[node]:
            network.connect(number, 1, problem.alloc[node])
        for before in problem.predecessors[node]:
            if before in numbers:
                network.connect(number, numbers[before], UNLIMITED)
    network.fill(0, 1, most_work)
    return network, numbers
