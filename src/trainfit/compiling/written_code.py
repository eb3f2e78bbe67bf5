"""What inductor's code of a graph allocates, hands on and lets go, read off the lines that inductor writes.

Inductor turns its kernels into a function: lines that allocate a buffer, write a result over another, hand a
released buffer on to a later one, call something, delete names. They are made by inductor itself, as for the
code that will run, and are only read here; nothing is compiled. So it need not be known how inductor decides.
On a CPU kernels in a row are one C++ function, for example: what they make is allocated before its call, and
what they are the last to read is let go after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._inductor import ir
from torch._inductor.codegen import wrapper as w
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import NopKernelSchedulerNode
from torch._inductor.utils import get_dtype_size
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class GivenStorage:
    """Memory that forward made and hands to backward, under one name or several: views share it."""

    names: tuple[str, ...]
    bytes: int
    stays: bool
    """Whether somebody else has it, too, so that it is there as long as backward runs."""


@dataclass(frozen=True)
class CodeStorage:
    """Memory that the code of a graph makes, or is given and lets go."""

    name: str
    """The buffer that it was made for, or the first of its names as an input."""
    bytes: int
    start: int
    """The call before or in which it is made; -1 if it is given."""
    end: int | None
    """The last call while which it is there; None if it is returned."""


@dataclass(frozen=True)
class WrittenCode:
    """The calls of the code of one graph, and the memory around them."""

    calls: int
    called_at: tuple[int, ...]
    """For each of the scheduler's nodes the call that runs it; -1 if it runs nothing."""
    storages: tuple[CodeStorage, ...]
    owner: Mapping[str, str]
    """For each buffer and input that is memory the name of the storage that it lies in."""
    results: tuple[str | None, ...]
    """For each result of the graph the storage that it lies in; None if the code has not made it."""

    def alive(self) -> list[int]:
        """Return the bytes that are there during each call."""
        change = [0] * (self.calls + 1)
        for storage in self.storages:
            change[max(storage.start, 0)] += storage.bytes
            if storage.end is not None:
                change[storage.end + 1] -= storage.bytes
        found, total = [], 0
        for step in change[:-1]:
            total += step
            found.append(total)
        return found


def runs_nothing(node: Any) -> bool:
    """Whether a scheduler's node runs no kernel: it takes one of several results, or only has memory."""
    if isinstance(node, NopKernelSchedulerNode):
        return True
    return all(isinstance(part.node, ir.MultiOutput) for part in node.get_nodes())


def written_code(graph: GraphLowering, given: Sequence[GivenStorage] = ()) -> WrittenCode:
    """Let inductor write the code of a graph that it has scheduled, and read it; once for each graph.

    `given` are the inputs that the code may let go; all others are the caller's and no memory of the graph.
    """
    lines = list(_lines(graph))
    return _Reader(graph, lines).read(given)


class _NotedLines(list[Any]):
    """Lines of code, each noted with the place of the scheduler's node at which it was written."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self.places: list[int] = []
        self._scheduler = scheduler
        self._place = {id(node): n for n, node in enumerate(scheduler.nodes)}

    def append(self, line: Any) -> None:
        self.places.append(self._place.get(id(self._scheduler.current_node), -1))
        super().append(line)


def _lines(graph: GraphLowering) -> Iterator[tuple[int, Any]]:
    """Yield the lines of the code, each with the place of the scheduler's node at which it was written."""
    wrapper: Any = graph.wrapper_code
    assert not wrapper.lines, "the code of a graph is written once"
    lines = wrapper.lines = _NotedLines(graph.scheduler)
    wrapper.push_codegened_graph(graph)
    graph.scheduler.codegen()
    # Decides what is handed on. It puts lines in the place of others, and leaves out the last ones.
    wrapper.run_wrapper_ir_passes(False)
    wrapper.pop_codegened_graph()
    yield from zip(lines.places, wrapper.lines)


class _Reader:
    """Goes through the lines as Python will, and keeps track of what each name holds."""

    def __init__(self, graph: GraphLowering, lines: Sequence[tuple[int, Any]]) -> None:
        self._lines = lines
        self._nodes: list[Any] = graph.scheduler.nodes
        self._renamed: Mapping[str, str] = graph.scheduler.mutation_real_name
        self._graph = graph
        self._outputs = set(graph.get_output_names())
        self._called = [-1] * len(self._nodes)
        self._calls = 0
        self._before = 0
        """The first of the nodes that no call of a kernel of inductor's own has passed yet."""
        self._made: list[tuple[str, int, int]] = []
        """Name, bytes and first call of each storage."""
        self._ends: dict[int, int] = {}
        self._held: dict[str, list[int]] = {}
        """The storages that each name holds now; several for the results of one call."""
        self._holders: list[int] = []
        """How many names hold each storage."""
        self._owner: dict[str, str] = {}

    def read(self, given: Sequence[GivenStorage]) -> WrittenCode:
        for storage in given:
            self._make(storage.names[0], storage.bytes, -1)
            held = self._held[storage.names[0]]
            for name in storage.names[1:]:
                self._hold(name, held)
            self._holders[held[0]] += storage.stays
        for place, line in self._lines:
            self._follow(place, line)
        returned = {number for name in self._outputs for number in self._held.get(name, ())}
        last = max(self._calls - 1, 0)
        storages = []
        for number, (name, size, start) in enumerate(self._made):
            end = None if number in returned else self._ends.get(number, last)
            if size and (end is None or end >= start) and (start >= 0 or end is None or end >= 0):
                storages.append(CodeStorage(name, size, min(start, last), end))
        results = tuple(self._result(result) for result in self._graph.graph_outputs)
        return WrittenCode(self._calls, tuple(self._called), tuple(storages), self._owner, results)

    def _result(self, result: Any) -> str | None:
        if isinstance(result, ir.NoneAsConstantBuffer | ir.ShapeAsConstantBuffer):
            return None
        held = self._held.get(str(result.get_name()), ())
        made = [self._made[number] for number in held]
        return next((name for name, _, start in made if start >= 0), None)

    def _follow(self, place: int, line: Any) -> None:
        if isinstance(line, w.AllocateLine):
            self._make(line.node.get_name(), _bytes(line.node), self._calls)
        elif isinstance(line, w.ReuseLine):
            old = line.node.get_name()
            self._hold(line.reused_as.get_name(), self._held.get(old, []))
            if line.delete_old and old not in self._outputs:
                self._delete(old)
        elif isinstance(line, w.ReinterpretLine):
            self._hold(line.reused_as.get_name(), self._held.get(line.node.get_name(), []))
        elif isinstance(line, w.FreeIfNotReusedLine):
            if not line.is_reused:
                self._delete(line.node.get_name())
        elif isinstance(line, w.FreeLine):
            self._delete(line.node.get_name())
        elif isinstance(line, w.KernelCallLine):
            ran = range(self._before, place + 1)
            self._call(n for n in ran if not runs_nothing(self._nodes[n]) and not self._nodes[n].is_extern())
            self._before = place + 1
        elif not isinstance(line, w.MemoryPlanningLine | w.CommentLine | w.MultiOutputLine):
            self._call_of_torch(place, line)

    def _call(self, nodes: Iterator[int]) -> None:
        for number in nodes:
            self._called[number] = self._calls
        self._calls += 1

    def _call_of_torch(self, place: int, line: Any) -> None:
        """Follow the call of a kernel of torch's own, however it is written: the first line of its node."""
        node = self._nodes[place] if place >= 0 else None
        if node is None or not node.is_extern() or self._called[place] >= 0 or runs_nothing(node):
            return
        if isinstance(line, str) and line.lstrip().startswith("#"):
            return
        for buffer in node.get_outputs():
            name, kernel = buffer.get_name(), buffer.node
            if name in self._held or name in self._renamed or isinstance(kernel.layout, ir.NoneLayout):
                continue
            if isinstance(kernel.layout, ir.MultiOutputLayout):
                self._make_several(name, kernel)
            elif lent := [n for n in kernel.get_inputs_that_alias_output() if n in self._held]:
                self._hold(name, [number for n in lent for number in self._held[n]])
            else:
                self._make(name, _bytes(kernel), self._calls)
        self._call(iter((place,)))

    def _make_several(self, name: str, kernel: Any) -> None:
        """Make all results of a call: those that nobody takes are there as long as their tuple, too."""
        parts = [part for part in tree_leaves(getattr(kernel, "outputs", ())) if isinstance(part, ir.Buffer)]
        lent = [n for n in kernel.get_inputs_that_alias_output() if n in self._held]
        held = [number for n in lent for number in self._held[n]]
        for part in () if lent else parts:
            self._make(part.get_name(), _bytes(part), self._calls)
            held += self._held[part.get_name()]
        for part in parts if lent else ():
            self._hold(part.get_name(), held)
        self._hold(name, held)

    def _make(self, name: str, size: int, start: int) -> None:
        self._made.append((name, size, start))
        self._holders.append(0)
        self._hold(name, [len(self._made) - 1])

    def _hold(self, name: str, storages: Sequence[int]) -> None:
        for number in storages:
            self._holders[number] += 1
        self._held[name] = list(storages)
        if storages:
            self._owner[name] = self._made[storages[0]][0]

    def _delete(self, name: str) -> None:
        for number in self._held.pop(name, ()):
            self._holders[number] -= 1
            if not self._holders[number]:
                self._ends[number] = self._calls - 1


def _bytes(buffer: Any) -> int:
    length = V.graph.get_allocation_storage_size(buffer)
    count = V.graph.sizevars.optimization_hint(length, fallback=0)
    return int(count) * get_dtype_size(buffer.get_dtype())
