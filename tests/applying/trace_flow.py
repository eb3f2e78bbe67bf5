"""The flow of a region read off a trace: a second way to know what the executor finds out as it runs."""

from __future__ import annotations

from collections.abc import Sequence

from trainfit.operators.value_use import reads_metadata_only
from trainfit.recomputation import NOBODY, Flow, FlowOp, Version, starts_stream
from trainfit.trace import Trace


def flow_of(trace: Trace, call: int, decisions: Sequence[str] | None = None) -> tuple[Flow, dict[int, int]]:
    """Return the flow of a module call's forward, and its numbers of the trace's storages.

    `decisions` say for each op what the plan wants; they matter only for random draws.
    """
    reader = _TraceFlow(trace, call, decisions)
    return reader.flow, reader.numbers


class _TraceFlow:
    """Reads the flow of one region off a trace; `numbers` maps the trace's storages to the flow's."""

    def __init__(self, trace: Trace, call: int, decisions: Sequence[str] | None) -> None:
        start, end = trace.calls[call].forward_start, trace.calls[call].forward_end
        self.flow = Flow()
        self.numbers: dict[int, int] = {}
        self._written_at: dict[int, list[int]] = {}
        decision_before: str | None = None
        for position in range(start, end):
            op = trace.ops[position]
            signature = trace.signatures[op.signature]
            number = position - start
            if signature.view:
                self.flow.ops.append(FlowOp())
                continue
            metadata_only = reads_metadata_only(signature.name)
            reads = [] if metadata_only else [self._read(storage) for storage in dict.fromkeys(op.reads)]
            writes = [self._write(storage, number, position) for storage in dict.fromkeys(op.writes)]
            row = FlowOp(
                reads=[version for version in reads if all(version[0] != written for written, _ in writes)],
                writes=writes,
                creates=[self._number(storage, number) for storage in op.creates],
            )
            if signature.random:
                decision = decisions[number] if decisions is not None else "recompute"
                row.stream, row.starts_stream = 0, starts_stream(decision, decision_before)
                decision_before = decision
            self.flow.ops.append(row)
        self._find_needed(trace, start, end, trace.calls[call].backward_start)

    def _number(self, storage: int, maker: int) -> int:
        if storage not in self.numbers:
            self.numbers[storage] = self.flow.storage(maker)
            if maker == NOBODY:
                self.flow.permanent.add(self.numbers[storage])
        return self.numbers[storage]

    def _read(self, storage: int) -> Version:
        number = self._number(storage, NOBODY)
        return number, self.flow.version(number)

    def _write(self, storage: int, op: int, position: int) -> Version:
        number = self._number(storage, NOBODY)
        self.flow.makers[number].append(op)
        self._written_at.setdefault(storage, []).append(position)
        return number, self.flow.version(number)

    def _find_needed(self, trace: Trace, start: int, end: int, backward_start: int) -> None:
        for storage, number in self.numbers.items():
            if number in self.flow.permanent:
                continue
            writes = self._written_at.get(storage, [])
            for hold in trace.storages[storage].held_by("autograd"):
                # A result of the last op is saved at the same time as an argument of the op that follows the
                # region; that one is released before the region's backward begins.
                by_last_op = hold.start == end and (hold.end is None or hold.end > backward_start)
                if start <= hold.start < end or by_last_op:
                    self.flow.needed.append((number, sum(position < hold.start for position in writes)))
