"""`CompiledPlan`: what the graphs of a compiled step keep for backward, and what that promises. Plain data.

A value is known by what computes it: the module, the operator, and which of the module's calls of that
operator it is. That is the same in every version of torch and in every process; names of graph nodes are not.
A graph is known by all such values of its forward, in order, and by their shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainfit.basics.in_notebooks import ShownInNotebooks
from trainfit.basics.units import format_bytes, format_seconds
from trainfit.traces.settings import UNKNOWN_SETTINGS, Settings


@dataclass(frozen=True, slots=True, order=True)
class ValueName:
    """What a value of a graph is known by."""

    module: str
    """The module's name below the one that is compiled; empty for that one."""
    operator: str
    """Such as `aten.mm.default`."""
    number: int
    """Which of the module's calls of that operator, counted from 0."""
    result: int = 0
    """Which of the operator's results."""


@dataclass(frozen=True, slots=True)
class GraphChoice:
    """One graph of a compiled step, divided."""

    operators_hash: str
    """Of the operators of its forward by module, in order: another graph is not divided by this."""
    shapes_hash: str
    """The same with the shapes and dtypes of the results: what the bytes are of."""
    operators: int
    kept: tuple[ValueName, ...]
    """What crosses from forward to backward, besides inputs; everything else runs again."""
    kept_bytes: int
    repeated: int
    """How many nodes of forward run again in backward."""
    recompute_seconds: float
    """What that adds."""
    forward_peak_bytes: int
    """Above what is there before the call."""
    backward_peak_bytes: int


@dataclass(frozen=True)
class CompiledPlan(ShownInNotebooks):
    """The choices for all graphs of a step that torch.compile compiles, and what they promise."""

    target: str
    device: str
    torch: str
    backend: str
    """For which the graphs were counted: `inductor` fuses kernels, `aot_eager` does not."""
    budget_bytes: int
    graphs: tuple[GraphChoice, ...]
    calls: tuple[int, ...]
    """The graphs that one step calls, in order, by their number."""
    peak_bytes: int
    """Of the whole step, certified on the graphs in their final order."""
    memory_bytes: int
    """The least memory with which it runs, as the device's allocator hands it out; on a CPU the peak."""
    step_seconds: float
    baseline_peak_bytes: int
    """Of the compiled step as torch's own partitioner divides it."""
    baseline_step_seconds: float
    settings: Settings = UNKNOWN_SETTINGS

    def __repr__(self) -> str:
        """One line: there may be thousands of values."""
        return (
            f"<CompiledPlan for {self.target} on {self.device}: {len(self.graphs)} graphs, peak "
            f"{format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)}, "
            f"{format_seconds(self.step_seconds)} per step>"
        )

    @property
    def added_seconds(self) -> float:
        """What the plan adds to the step."""
        return self.step_seconds - self.baseline_step_seconds
