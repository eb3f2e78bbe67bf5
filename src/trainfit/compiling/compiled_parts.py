"""The calls of compiled modules in a captured eager step: which ops they are, and which graphs they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trainfit.compiling.step_graphs import GraphCall
from trainfit.errors import StepError
from trainfit.traces.trace import Trace


@dataclass
class CompiledPart:
    """One call of a compiled module: its ops in the eager step, its graphs, and where those are now."""

    module: str
    call: int
    forward: range
    inside: frozenset[int]
    """The module calls that it consists of, itself among them."""
    graphs: list[int]
    again: frozenset[int]
    """Ops of the user's own checkpoints inside: the graphs compute that again themselves."""
    forward_at: list[int] = field(default_factory=list)
    """Where the kernels of each graph begin; empty until they are there."""
    backward_at: dict[int, int] = field(default_factory=dict)
    """The same for backward, by the graph's place in `graphs`."""


def compiled_parts(trace: Trace, calls: Sequence[GraphCall]) -> Iterator[CompiledPart]:
    """Yield the calls of compiled modules, found in the eager step by their module."""
    root = trace.modules[trace.model].name
    graphs: dict[str, dict[int, list[int]]] = {}
    for ran in calls:
        graphs.setdefault(ran.module, {}).setdefault(ran.number, []).append(ran.graph)
    for path, by_number in graphs.items():
        name = f"{root}.{path}" if path else root
        called = [
            number
            for number, call in enumerate(trace.calls)
            if trace.modules[call.module].name == name and not call.recompute
        ]
        if len(called) < len(by_number):
            raise StepError(
                f"the compiled step calls {name} more often than the captured one: it does not do the same "
                "in every run, so that nothing can be said about it."
            )
        again = _computed_again(trace, name)
        for place, number in enumerate(called):
            inside = {trace.ops[op].call for op in again} - {-1}
            for other, call in enumerate(trace.calls):
                if other == number or call.parent in inside:
                    inside.add(other)
            own = trace.calls[number]
            forward = range(own.forward_start, own.forward_end)
            ran_graphs = by_number[place % len(by_number)]
            yield CompiledPart(name, number, forward, frozenset(inside), ran_graphs, again)


def _computed_again(trace: Trace, name: str) -> frozenset[int]:
    """Return the ops that checkpoints inside of a module run again in backward.

    A checkpoint around the module calls all of it again: its graphs do not know that.
    """
    if any(call.recompute and trace.modules[call.module].name == name for call in trace.calls):
        return frozenset()
    below = {n for n, m in enumerate(trace.modules) if m.name == name or m.name.startswith(f"{name}.")}
    return frozenset(n for n, op in enumerate(trace.ops) if op.recompute and op.module in below)
