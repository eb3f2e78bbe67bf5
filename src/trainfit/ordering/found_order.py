"""`Order`: the order that was found, how it compares, and how far it is at most from the best possible."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainfit.ordering.graph import BufferGraph


@dataclass(frozen=True)
class Order:
    """One order of a graph. All bytes are predicted."""

    graph: BufferGraph
    steps: tuple[int, ...]
    """The nodes, by their numbers in the graph, in the order in which to run them."""
    peak_bytes: int
    lower_bound_bytes: int
    """No order of this graph has a smaller peak."""
    method: str
    """What found the order: one of `methods`."""
    methods: dict[str, int]
    """The peak that each method reached; `baseline` is the given order."""
    seconds: float = field(default=0.0, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the nodes in the order in which to run them."""
        return tuple(self.graph.nodes[node].name for node in self.steps)

    @property
    def baseline_peak_bytes(self) -> int:
        """The peak of the order as it was given."""
        return self.methods["baseline"]

    @property
    def optimal(self) -> bool:
        """Whether no order has a smaller peak."""
        return self.peak_bytes == self.lower_bound_bytes

    @property
    def gap(self) -> float:
        """How much smaller the best possible peak is at most, as a share of this one."""
        return 1.0 - self.lower_bound_bytes / self.peak_bytes if self.peak_bytes else 0.0

    @property
    def quality(self) -> str:
        """`optimal`, or how near the best possible the order is at least."""
        return "optimal" if self.optimal else f"within {_percent(self.gap)} of the best possible"

    def reordered(self) -> BufferGraph:
        """Return the graph with its nodes in this order."""
        nodes = tuple(self.graph.nodes[node] for node in self.steps)
        return BufferGraph(nodes, self.graph.buffers, self.graph.inputs)


def _percent(share: float) -> str:
    """Return a share as a percentage, rounded up: a promise must hold."""
    for digits in (1, 2, 3):
        step = 10 ** -(digits + 2)
        if share >= step:
            return f"{-(-share // step) * step * 100:.{digits}f} %"
    return "0.001 %"
