"""`CompilePlan`: what was planned for the graphs of a compiled step, as its graphs were compiled."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainfit.basics.units import format_bytes, format_seconds
from trainfit.compiling.recompute_problem import GraphLimits
from trainfit.compiling.step_shares import step_peak


@dataclass(frozen=True)
class PlannedGraph:
    """One graph that was compiled."""

    nodes: int
    """Of the joint graph."""
    kept: tuple[str, ...]
    """Names of the nodes that cross from forward to backward; empty if torch divided the graph."""
    kept_bytes: int
    repeated: int
    """How many nodes of forward run again in backward."""
    seconds: float
    """What that adds."""
    forward_peak_bytes: int
    """As the code that is compiled has it, above what is there before the step."""
    backward_peak_bytes: int
    held_bytes: int
    """Between forward and backward: what is kept, and what forward returned."""
    gradient_bytes: int
    """What backward returns."""
    limits: GraphLimits
    refused: str = ""
    """Why it was not planned: torch's own partitioner has divided it."""

    @property
    def peak_bytes(self) -> int:
        """The most of forward and backward."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)


@dataclass
class CompilePlan:
    """The budget of a compiled step and its graphs so far; grows while graphs are compiled."""

    budget_bytes: int
    standing_bytes: int
    """Parameters, buffers, optimizer state, the batch, and what the caller said: there all the time."""
    graphs: list[PlannedGraph] = field(default_factory=list)
    calls: tuple[int, ...] = (0,)
    """The graphs that one step calls, in order, by their number."""

    @property
    def promised_bytes(self) -> int | None:
        """The peak of the step's forward and backward; None while a graph of it is not compiled."""
        if not self.graphs or max(self.calls, default=0) >= len(self.graphs):
            return None
        return self.standing_bytes + step_peak([self.graphs[call] for call in self.calls])

    def __str__(self) -> str:
        """Say what was planned in a line."""
        planned = [graph for graph in self.graphs if not graph.refused]
        promised = "not compiled yet" if self.promised_bytes is None else format_bytes(self.promised_bytes)
        added = format_seconds(sum(graph.seconds for graph in planned))
        return (
            f"budget {format_bytes(self.budget_bytes)}, peak {promised} (predicted), "
            f"{len(planned)} of {len(self.graphs)} graphs planned, {added} of computing again"
        )
