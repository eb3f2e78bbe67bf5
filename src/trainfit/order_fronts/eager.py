"""What another order could save in a step that runs without a compiler: a `Trace` as a `BufferGraph`.

Each op is a node, each storage a buffer, and a kernel's workspace a buffer that its own node releases. Given
in the order of the trace, the graph has the peak that `simulate` predicts, as long as storages are released
`as_held`: after the op at which their last holder let go. With `as_held=False` they are released after the
last op that uses them, as in a program that holds nothing for longer than it needs it.

Not modelled: storages that are resized in place count with their largest size all the time.
"""

from __future__ import annotations

from trainfit.ordering.graph import Buffer, BufferGraph, Node
from trainfit.traces.trace import Storage, Trace


def trace_graph(trace: Trace, *, as_held: bool = True) -> BufferGraph:
    """Return the step as a graph; ops keep their order where they share random numbers, links or storages."""
    return _TraceReader(trace, as_held).read()


class _TraceReader:
    """Goes through the ops in order and notes who made, uses and changes each storage."""

    def __init__(self, trace: Trace, as_held: bool) -> None:
        self._trace = trace
        self._names = [f"{number}:{trace.op_name(number)}" for number in range(len(trace.ops))]
        self._as_held = as_held
        self._buffers: list[Buffer] = []
        self._inputs: list[str] = []
        self._made: list[list[str]] = [[] for _ in trace.ops]
        self._released: list[list[int]] = [[] for _ in trace.ops]
        """The storages that go when each op has run, although it may not use them."""

    def read(self) -> BufferGraph:
        self._add_storages()
        return BufferGraph(self._nodes(), tuple(self._buffers), tuple(self._inputs))

    def _add_storages(self) -> None:
        ops = len(self._trace.ops)
        self._known = [False] * len(self._trace.storages)
        for number, storage in enumerate(self._trace.storages):
            if storage.start >= ops or storage.end == max(storage.start, 0):
                continue  # never alive while an op runs
            self._known[number] = True
            size = _largest_bytes(self._trace, storage)
            self._buffers.append(Buffer(f"s{number}", size, size, output=storage.end is None))
            if storage.start < 0:
                self._inputs.append(f"s{number}")
            else:
                self._made[storage.start].append(f"s{number}")
            if storage.end is not None and self._as_held:
                self._released[storage.end - 1].append(number)
        for number, op in enumerate(self._trace.ops):
            workspace = self._trace.signatures[op.signature].workspace_bytes
            if workspace:
                self._buffers.append(Buffer(f"w{number}", workspace, workspace))
                self._made[number].append(f"w{number}")

    def _nodes(self) -> tuple[Node, ...]:
        found = []
        last_writer: dict[int, int] = {}
        users: dict[int, list[int]] = {}
        in_line: dict[str, int] = {}
        for number, op in enumerate(self._trace.ops):
            signature = self._trace.signatures[op.signature]
            after: list[int] = []
            for storage in dict.fromkeys((*op.reads, *op.writes)):
                after += [last_writer[storage]] if storage in last_writer else []
                if storage in op.writes:
                    after += users.get(storage, [])
                    users[storage] = []
                    last_writer[storage] = number
                else:
                    users.setdefault(storage, []).append(number)
            for line, member in (("random", signature.random), ("collective", signature.collective)):
                if member:
                    after += [in_line[line]] if line in in_line else []
                    in_line[line] = number
            used = dict.fromkeys((*op.reads, *op.writes, *self._released[number]))
            reads = [f"s{storage}" for storage in used if self._known[storage]]
            waits = [self._names[other] for other in dict.fromkeys(after) if other != number]
            own = set(self._made[number])
            read = tuple(name for name in reads if name not in own)
            found.append(Node(self._names[number], tuple(self._made[number]), read, tuple(waits)))
        return tuple(found)


def _largest_bytes(trace: Trace, storage: Storage) -> int:
    return trace.memory.occupied(max((storage.bytes, *(size for _, size in storage.resizes))))
