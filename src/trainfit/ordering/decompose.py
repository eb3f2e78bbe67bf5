"""Split a problem where every order has to pass: each part can then be ordered by itself.

A node that every other node must precede or follow divides the others once and for all. The peak of the whole
is the largest of the parts' peaks, and so is the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainfit.ordering.problem import Problem, make_problem


@dataclass(frozen=True)
class Part:
    """A stretch of the order: its nodes in the whole problem, and the problem of ordering them.

    Node i of `problem` is `nodes[i]` of the whole; they are in the order that the whole was given in.
    """

    nodes: list[int]
    problem: Problem


def split(problem: Problem, order: Sequence[int]) -> list[Part]:
    """Return the parts of a problem in sequence, given any possible order of it."""
    ends = _borders(problem, order)
    starts = [0, *ends[:-1]]
    return parts_between(problem, order, list(zip(starts, ends)))


def parts_between(problem: Problem, order: Sequence[int], ranges: list[tuple[int, int]]) -> list[Part]:
    """Return the problems of reordering ranges of an order, each while the others stay as they are.

    The ranges follow each other and together are the whole order.
    """
    part_of = [0] * problem.count
    number_in = [0] * problem.count
    for part, (start, end) in enumerate(ranges):
        for number, node in enumerate(order[start:end]):
            part_of[node], number_in[node] = part, number
    blocks: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in ranges]
    for members, freed in zip(problem.members, problem.freed):
        # A block is released in the part that has the last of its members.
        last = max([part_of[node] for node in members])
        inner = sorted([number_in[node] for node in members if part_of[node] == last])
        blocks[last].append((tuple(inner), freed))
    found = []
    memory = problem.initial_bytes
    for part, (start, end) in enumerate(ranges):
        nodes = list(order[start:end])
        inner_problem = make_problem(
            rise=[problem.rise[node] for node in nodes],
            alloc=[problem.alloc[node] for node in nodes],
            predecessors=[
                [number_in[before] for before in problem.predecessors[node] if part_of[before] == part]
                for node in nodes
            ],
            blocks=blocks[part],
            initial_bytes=memory,
        )
        found.append(Part(nodes, inner_problem))
        memory = inner_problem.final_bytes
    return found


def _borders(problem: Problem, order: Sequence[int]) -> list[int]:
    """Return the positions before which a part ends, the last one being the length of the order."""
    after_all_before = _only_end(order, problem.predecessors)
    before_all_after = _only_end(order[::-1], problem.successors)[::-1]
    borders: set[int] = {len(order)}
    for position, (last, first) in enumerate(zip(after_all_before, before_all_after)):
        if last and first:
            borders |= {position, position + 1}
    return sorted(borders - {0}) or [0]


def _only_end(order: Sequence[int], neighbours: Sequence[tuple[int, ...]]) -> list[bool]:
    """Return for each node of a sequence whether all before it lead to it."""
    continued = [False] * len(neighbours)
    ends = 0
    found = []
    for node in order:
        ends += 1
        for other in neighbours[node]:
            if not continued[other]:
                continued[other] = True
                ends -= 1
        found.append(ends == 1)
    return found
