"""The flow of a region, read off a trace: what the executor will see of it, and what it will run again.

Which ops run again is asked of `recomputation.py`, as the executor does: it knows the flow from running it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainfit.operators.collectives import fills_outputs
from trainfit.operators.value_use import reads_metadata_only
from trainfit.planning.model_calls import own_ops
from trainfit.plans.decisions import Decision
from trainfit.plans.recomputation import NOBODY, Flow, FlowOp, Version, rerun, starts_stream
from trainfit.traces.trace import Interval, Trace

Saved = Mapping[int, Sequence[Interval]]
"""What autograd saved inside a region: storages and its holds; none for what one call hands to the next."""


@dataclass
class RegionFlow:
    """The flow of a region's ops, in the numbers of the trace; its calls draw random numbers separately."""

    ops: Sequence[int]
    flow: Flow = field(default_factory=Flow)
    numbers: dict[int, int] = field(default_factory=dict)
    """The flow's numbers of the trace's storages."""
    draws: list[list[int]] = field(default_factory=list)
    """For each call, the ops that draw random numbers."""

    def first_draws(self, decision_of: Callable[[int], Decision]) -> Iterator[int]:
        """Yield the draws before which the generator's state is remembered, given the decisions about ops."""
        for draws in self.draws:
            decisions = [decision_of(op) for op in draws]
            for op, decision, before in zip(draws, decisions, (None, *decisions)):
                if starts_stream(decision, before):
                    yield op

    def runs_again(self, kept: Iterable[int], first_draws: Iterable[int]) -> set[int]:
        """Return the ops that run again when these storages were kept, and these draws begin from a state."""
        flow = self.flow
        if self.draws:
            begins = set(first_draws)
            ops = list(flow.ops)
            for op in (op for draws in self.draws for op in draws):
                number = bisect_left(self.ops, op)
                ops[number] = replace(ops[number], starts_stream=op in begins)
            flow = replace(flow, ops=ops)
        found = rerun(flow, (self.numbers[storage] for storage in kept))
        return {op for op, runs in zip(self.ops, found.runs) if runs}


def flow_of(trace: Trace, calls: Sequence[int], saved: Saved) -> RegionFlow:
    """Return the flow of calls in a row whose results are needed in backward as `saved` says."""
    starts = [trace.calls[call].body.start for call in calls]
    found = RegionFlow(own_ops(trace, range(starts[0], trace.calls[calls[-1]].body.stop)))
    flow, numbers = found.flow, found.numbers
    draws: dict[int, list[int]] = {}
    written_at: dict[int, list[int]] = {}

    def number_of(storage: int, maker: int = NOBODY) -> int:
        if storage not in numbers:
            numbers[storage] = flow.storage(maker)
            if maker == NOBODY:
                flow.permanent.add(numbers[storage])
        return numbers[storage]

    def write(storage: int, op: int) -> Version:
        number = number_of(storage)
        flow.makers[number].append(len(flow.ops) - 1)
        written_at.setdefault(storage, []).append(op)
        return number, flow.version(number)

    for position in found.ops:
        op = trace.ops[position]
        signature = trace.signatures[op.signature]
        row = FlowOp(must_run=fills_outputs(signature.name))
        flow.ops.append(row)
        if signature.view:
            continue
        if not reads_metadata_only(signature.name):
            read = [number_of(storage) for storage in dict.fromkeys(op.reads) if storage not in op.writes]
            row.reads = [(number, flow.version(number)) for number in read]
        row.writes = [write(storage, position) for storage in dict.fromkeys(op.writes)]
        row.creates = [number_of(storage, len(flow.ops) - 1) for storage in op.creates]
        if signature.random:
            row.stream = bisect_right(starts, position)
            draws.setdefault(row.stream, []).append(position)
    found.draws.extend(draws.values())
    for storage, holds in saved.items():
        if storage in numbers and numbers[storage] not in flow.permanent:
            # What is handed on is needed as it is when the next call begins.
            begins = bisect_right(starts, trace.storages[storage].producer)
            times = [hold.start for hold in holds] or [starts[begins]]
            writes = written_at.get(storage, [])
            flow.needed += [(numbers[storage], bisect_left(writes, time)) for time in times]
    return found
