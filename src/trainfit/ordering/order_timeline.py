"""What an order of a graph needs: when each buffer lives, memory at every step, the peak.

Both estimates of the same memory are here: `live_bytes`, one figure per step with the step's results included
and nothing of its inputs released yet, and `after_alloc` / `after_free`, the two figures of every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainfit.errors import GraphError
from trainfit.ordering.graph import BufferGraph


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One buffer's life: allocated when step `start` begins, released when step `end` has run.

    `end` is None for what is never released; `last_user` is then None too. An input starts at step 0.
    """

    buffer: str
    size_alloc: int
    size_free: int
    start: int
    end: int | None
    last_user: str | None


@dataclass(frozen=True)
class OrderTimeline:
    """Bytes over one order of a graph."""

    graph: BufferGraph
    order: tuple[int, ...]
    lifetimes: tuple[Lifetime, ...]
    """Inputs first, then what the steps make, in the order in which they make it."""

    @cached_property
    def initial_bytes(self) -> int:
        """Inputs, before the first step."""
        inputs = set(self.graph.inputs)
        return sum(life.size_free for life in self.lifetimes if life.buffer in inputs)

    @cached_property
    def allocated_and_freed(self) -> tuple[tuple[int, int], ...]:
        """Bytes that each step allocates and releases; inputs count as allocated by the first step."""
        return allocated_and_freed(self.lifetimes if self.order else (), len(self.order))

    @cached_property
    def after_alloc(self) -> tuple[int, ...]:
        """Memory when each step has allocated its results."""
        return tuple(memory for memory, _ in memory_over(self.allocated_and_freed))

    @cached_property
    def after_free(self) -> tuple[int, ...]:
        """Memory when each step has released what no later step reads."""
        return tuple(memory for _, memory in memory_over(self.allocated_and_freed))

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Memory while each step runs, and last, after all of them."""
        return (*self.after_alloc, self.after_free[-1] if self.order else self.initial_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at any time."""
        return max(self.live_bytes)


def allocated_and_freed(lifetimes: Iterable[Lifetime], steps: int) -> tuple[tuple[int, int], ...]:
    """Return the bytes that each of so many steps allocates and releases."""
    found = [[0, 0] for _ in range(steps)]
    for life in lifetimes:
        found[life.start][0] += life.size_alloc
        if life.end is not None:
            found[life.end][1] += life.size_free
    return tuple((allocated, freed) for allocated, freed in found)


def memory_over(steps: Iterable[tuple[int, int]], memory: int = 0) -> list[tuple[int, int]]:
    """Return memory after each step's allocation and after its release; steps are (allocated, released)."""
    found = []
    for allocated, freed in steps:
        found.append((memory + allocated, memory + allocated - freed))
        memory += allocated - freed
    return found


def order_timeline(graph: BufferGraph, order: Sequence[int] | Sequence[str] | None = None) -> OrderTimeline:
    """Return the timeline of an order, given as node numbers or names; without one, of the given order."""
    steps = graph.baseline if order is None else _node_numbers(graph, order)
    step_of = {node: step for step, node in enumerate(steps)}
    last = [-1] * len(graph.buffers)
    for node, reads in enumerate(graph.reads):
        for read in reads:
            last[read] = max(last[read], step_of[node])
    inputs = [graph.buffer_number[name] for name in graph.inputs]
    made = [graph.buffer_number[name] for node in steps for name in graph.nodes[node].buffers]
    lifetimes = [_lifetime(graph, number, last[number], steps, step_of) for number in (*inputs, *made)]
    return OrderTimeline(graph, tuple(steps), tuple(lifetimes))


def _lifetime(
    graph: BufferGraph, number: int, last: int, steps: Sequence[int], step_of: dict[int, int]
) -> Lifetime:
    buffer, producer = graph.buffers[number], graph.producer[number]
    start = step_of[producer] if producer >= 0 else 0
    # What no other node reads is released by its own node; an input that none reads stays.
    end: int | None = max(last, start) if producer >= 0 or last >= 0 else None
    if graph.kept[number]:
        end = None
    size_alloc = buffer.size_alloc if producer >= 0 else buffer.size_free
    last_user = None if end is None else graph.nodes[steps[end]].name
    return Lifetime(buffer.name, size_alloc, buffer.size_free, start, end, last_user)


def _node_numbers(graph: BufferGraph, order: Sequence[int] | Sequence[str]) -> tuple[int, ...]:
    """Return the order as node numbers; refuse what is no possible order of this graph."""
    numbers = []
    for entry in order:
        number = graph.node_number.get(entry, -1) if isinstance(entry, str) else entry
        if not 0 <= number < len(graph.nodes):
            raise GraphError(f"the order names {entry!r}, but there is no such node.")
        numbers.append(number)
    if len(set(numbers)) != len(graph.nodes) or len(numbers) != len(graph.nodes):
        raise GraphError(f"an order has each of the {len(graph.nodes)} nodes once, this one {len(numbers)}.")
    step_of = {node: step for step, node in enumerate(numbers)}
    for node in numbers:
        for before in graph.predecessors[node]:
            if step_of[before] > step_of[node]:
                first, second = graph.nodes[before].name, graph.nodes[node].name
                raise GraphError(f"the order runs {second!r} before {first!r}, which it needs.")
    return tuple(numbers)
