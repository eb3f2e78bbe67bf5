"""How the graphs of a step share its memory: one point of each graph's trade-off, and its limits.

Graphs run forward one after the other and backward the other way round. While the graph of call i runs
forward, what the calls before it hold is alive; while it runs backward, that and the gradients of all calls
after it. A graph that is called often (a block that is compiled by itself) has the same partition each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trainfit.compiling.recompute_problem import GraphLimits, Partition


@dataclass(frozen=True)
class GraphUse:
    """One compiled graph of a step: its partitions, fastest last, and what it leaves behind."""

    partitions: tuple[Partition, ...]
    gradient_bytes: int
    """Of the parameters that it differentiates by."""


@dataclass(frozen=True)
class Shares:
    """What each graph may use, and what the step needs then, above what is there all the time."""

    limits: tuple[GraphLimits, ...]
    peak_bytes: int
    seconds: float


class CallMemory(Protocol):
    """What one call of a graph has alive, above what is there before it."""

    @property
    def forward_peak_bytes(self) -> int:
        """While it runs forward."""

    @property
    def backward_peak_bytes(self) -> int:
        """While it runs backward, with what it kept."""

    @property
    def held_bytes(self) -> int:
        """Between the two."""

    @property
    def gradient_bytes(self) -> int:
        """After backward."""


@dataclass(frozen=True)
class _PartitionCall:
    """A partition as one call of its graph."""

    forward_peak_bytes: int
    backward_peak_bytes: int
    held_bytes: int
    gradient_bytes: int


def step_peak(calls: Sequence[CallMemory]) -> int:
    """Return the most bytes that the calls of a step have alive."""
    most = before = 0
    after = sum(call.gradient_bytes for call in calls)
    for call in calls:
        after -= call.gradient_bytes
        most = max(most, before + call.forward_peak_bytes, before + call.backward_peak_bytes + after)
        before += call.held_bytes
    return most


def _peak(graphs: Sequence[GraphUse], chosen: Sequence[int], calls: Sequence[int]) -> int:
    found = []
    for graph, number in zip(graphs, chosen):
        p = graph.partitions[number]
        found.append(
            _PartitionCall(p.forward_peak_bytes, p.backward_peak_bytes, p.held_bytes, graph.gradient_bytes)
        )
    return step_peak([found[call] for call in calls])


def shared(graphs: Sequence[GraphUse], calls: Sequence[int], limit_bytes: int) -> Shares | None:
    """Return the limits of each graph with which the step keeps its own; None if nothing does.

    Begins with the fastest partition of every graph and gives up, again and again, the speed that costs the
    least for each byte of the step's peak.
    """
    chosen = [len(graph.partitions) - 1 for graph in graphs]
    peak = _peak(graphs, chosen, calls)
    while peak > limit_bytes:
        step = _best_step(graphs, calls, chosen, peak)
        if step is None:
            return None
        chosen[step[0]] = step[1]
        peak = _peak(graphs, chosen, calls)
    spare = (limit_bytes - peak) / max(len(calls), 1)
    limits = []
    for graph, number in zip(graphs, chosen):
        partition = graph.partitions[number]
        limits.append(
            GraphLimits(
                partition.forward_peak_bytes + spare,
                partition.held_bytes + spare,
                partition.backward_peak_bytes + spare,
            )
        )
    seconds = sum(graphs[call].partitions[chosen[call]].seconds for call in calls)
    return Shares(tuple(limits), peak, seconds)


def smallest_peak(graphs: Sequence[GraphUse], calls: Sequence[int]) -> int:
    """Return the smallest peak of the step that the partitions reach, going down step by step."""
    chosen = [len(graph.partitions) - 1 for graph in graphs]
    peak = _peak(graphs, chosen, calls)
    while (step := _best_step(graphs, calls, chosen, peak)) is not None:
        chosen[step[0]] = step[1]
        peak = _peak(graphs, chosen, calls)
    return peak


def _best_step(
    graphs: Sequence[GraphUse], calls: Sequence[int], chosen: Sequence[int], peak: int
) -> tuple[int, int] | None:
    """Return the graph and its other partition that lower the peak for the fewest seconds per byte."""
    best: tuple[float, int, int] | None = None
    for graph, now in enumerate(chosen):
        times = sum(1 for call in calls if call == graph)
        for other, partition in enumerate(graphs[graph].partitions):
            if other == now:
                continue
            changed = [*chosen[:graph], other, *chosen[graph + 1 :]]
            gained = peak - _peak(graphs, changed, calls)
            if gained > 0:
                added = times * (partition.seconds - graphs[graph].partitions[now].seconds)
                worth = (max(added, 0.0) / gained, graph, other)
                best = worth if best is None else min(best, worth)
    return None if best is None else (best[1], best[2])
