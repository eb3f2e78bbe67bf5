"""`BufferGraph`: what can be scheduled, as plain data: nodes, and the buffers they make and read.

A buffer has a size that is added when its node runs and a size that is released when its last reader has run;
they differ for nodes with several outputs, which allocate the sum while each part releases its own share. A
buffer that is a mutated or viewed other buffer (`alias_of`) owns nothing: it is the same memory under a new
name, and its readers keep the original alive. An input is alive from the start and is released after its last
reader, or kept if no node reads it. An output is never released. `Node.after` orders without keeping anything
alive.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from trainfit.errors import GraphError

_LONGEST_CYCLE_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Buffer:
    """One block of memory, or (with `alias_of`) another name for one. Sizes are bytes."""

    name: str
    size_alloc: int
    size_free: int
    output: bool = False
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One thing to run: the buffers it makes, those it reads, and the nodes it must follow anyway."""

    name: str
    buffers: tuple[str, ...]
    reads: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class BufferGraph:
    """Nodes in the order in which they would run now, all buffers, and which of them are inputs."""

    nodes: tuple[Node, ...]
    buffers: tuple[Buffer, ...]
    inputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be scheduled, naming the buffer, the node or the cycle."""
        _check_names(self)
        _check_sizes(self)
        _check_references(self)
        _check_aliases(self)
        _check_acyclic(self)

    @cached_property
    def buffer_number(self) -> dict[str, int]:
        """The position of each buffer by its name."""
        return {buffer.name: number for number, buffer in enumerate(self.buffers)}

    @cached_property
    def node_number(self) -> dict[str, int]:
        """The position of each node by its name."""
        return {node.name: number for number, node in enumerate(self.nodes)}

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """The node that makes each buffer; -1 for inputs."""
        found = [-1] * len(self.buffers)
        for number, node in enumerate(self.nodes):
            for name in node.buffers:
                found[self.buffer_number[name]] = number
        return tuple(found)

    @cached_property
    def root(self) -> tuple[int, ...]:
        """The buffer whose memory each buffer is: itself, unless it is an alias."""
        found = list(range(len(self.buffers)))
        for number, buffer in enumerate(self.buffers):
            while buffer.alias_of is not None:
                found[number] = self.buffer_number[buffer.alias_of]
                buffer = self.buffers[found[number]]
        return tuple(found)

    @cached_property
    def kept(self) -> tuple[bool, ...]:
        """Whether each buffer's memory is an output's, under whatever name."""
        found = [False] * len(self.buffers)
        for number, buffer in enumerate(self.buffers):
            if buffer.output:
                found[number] = found[self.root[number]] = True
        return tuple(found)

    @property
    def output_bytes(self) -> int:
        """What is alive in the end whatever the order, because it is never released."""
        return sum(buffer.size_free for buffer, kept in zip(self.buffers, self.kept) if kept)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """The buffers each node reads, and those whose memory it reads or changes under another name."""
        number, root = self.buffer_number, self.root
        found = []
        for node in self.nodes:
            named = [number[name] for name in node.reads]
            renamed = [root[number[name]] for name in node.buffers if root[number[name]] != number[name]]
            found.append(tuple(dict.fromkeys([*named, *(root[read] for read in named), *renamed])))
        return tuple(found)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """The nodes that have to run before each node."""
        found = []
        for number, node in enumerate(self.nodes):
            before = [self.producer[read] for read in self.reads[number]]
            for other in (self.node_number[name] for name in node.after):
                # What it changes in place was made before it, and counts as a predecessor too, as in torch.
                changed = [self.root[self.buffer_number[name]] for name in self.nodes[other].buffers]
                before += [other, *(self.producer[root] for root in changed)]
            found.append(tuple(sorted({other for other in before if other >= 0 and other != number})))
        return tuple(found)

    @cached_property
    def baseline(self) -> tuple[int, ...]:
        """The given order; where that is no possible one, the possible one that is nearest to it."""
        if all(max(before, default=-1) < number for number, before in enumerate(self.predecessors)):
            return tuple(range(len(self.nodes)))
        return tuple(_first_possible(self.predecessors))


def _first_possible(predecessors: tuple[tuple[int, ...], ...]) -> list[int]:
    """Return the nodes in order, each preceded by those of its predecessors that come too late."""
    order: list[int] = []
    done = [False] * len(predecessors)
    for start in range(len(predecessors)):
        pending = [start]
        while pending:
            node = pending[-1]
            missing = [before for before in predecessors[node] if not done[before]]
            if missing and not done[node]:
                pending.extend(reversed(missing))
                continue
            pending.pop()
            if not done[node]:
                done[node] = True
                order.append(node)
    return order


def _check_names(graph: BufferGraph) -> None:
    for kind, names in (
        ("nodes", [node.name for node in graph.nodes]),
        ("buffers", [buffer.name for buffer in graph.buffers]),
        ("inputs", list(graph.inputs)),
    ):
        if len(set(names)) != len(names):
            name, count = Counter(names).most_common(1)[0]
            raise GraphError(f"{count} {kind} are called {name!r}; names must be unique.")


def _check_sizes(graph: BufferGraph) -> None:
    for buffer in graph.buffers:
        for what, size in (("size_alloc", buffer.size_alloc), ("size_free", buffer.size_free)):
            if type(size) is not int:
                raise GraphError(f"{what} of buffer {buffer.name!r} must be a whole number, got {size!r}.")
            if size < 0:
                raise GraphError(f"{what} of buffer {buffer.name!r} is negative: {size}.")
        if buffer.alias_of is not None and (buffer.size_alloc or buffer.size_free):
            raise GraphError(
                f"buffer {buffer.name!r} is an alias of {buffer.alias_of!r} and has a size of its own; "
                "an alias is the same memory, so that both of its sizes are 0."
            )


def _check_references(graph: BufferGraph) -> None:
    maker: dict[str, str] = {}
    for node in graph.nodes:
        for name in node.buffers:
            _require(name in graph.buffer_number, f"node {node.name!r} makes buffer {name!r}", "buffer")
            if name in maker:
                raise GraphError(f"buffer {name!r} is made twice: by {maker[name]!r} and {node.name!r}.")
            maker[name] = node.name
        for name in node.reads:
            _require(name in graph.buffer_number, f"node {node.name!r} reads buffer {name!r}", "buffer")
        for name in node.after:
            _require(name in graph.node_number, f"node {node.name!r} comes after {name!r}", "node")
    inputs = set(graph.inputs)
    for name in graph.inputs:
        _require(name in graph.buffer_number, f"{name!r} is an input", "buffer")
        if name in maker:
            raise GraphError(f"buffer {name!r} is an input, but node {maker[name]!r} makes it.")
    for name in graph.buffer_number:
        if name not in maker and name not in inputs:
            raise GraphError(f"buffer {name!r} is made by no node and is no input.")


def _require(exists: bool, what: str, kind: str) -> None:
    if not exists:
        raise GraphError(f"{what}, but there is no such {kind}.")


def _check_aliases(graph: BufferGraph) -> None:
    for buffer in graph.buffers:
        if buffer.alias_of is None:
            continue
        seen = {buffer.name}
        current = buffer
        while current.alias_of is not None:
            _require(
                current.alias_of in graph.buffer_number,
                f"buffer {current.name!r} is an alias of {current.alias_of!r}",
                "buffer",
            )
            if current.alias_of in seen:
                raise GraphError(f"buffer {buffer.name!r} is an alias of itself.")
            seen.add(current.alias_of)
            current = graph.buffers[graph.buffer_number[current.alias_of]]


def _check_acyclic(graph: BufferGraph) -> None:
    """Name a cycle if there is one: nodes that wait for each other."""
    before = graph.predecessors
    waiting = [len(nodes) for nodes in before]
    followers: list[list[int]] = [[] for _ in before]
    for node, nodes in enumerate(before):
        for other in nodes:
            followers[other].append(node)
    ready = [node for node, count in enumerate(waiting) if count == 0]
    ran = 0
    while ready:
        ran += 1
        for follower in followers[ready.pop()]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    if ran < len(before):
        cycle = _find_cycle(before, waiting)
        names = [graph.nodes[node].name for node in cycle]
        raise GraphError(f"{len(names)} nodes wait for each other: {_shown([*names, names[0]])}.")


def _find_cycle(before: tuple[tuple[int, ...], ...], waiting: list[int]) -> list[int]:
    """Follow nodes that never became ready until one comes again; each runs before the next in the list."""
    node = next(node for node, count in enumerate(waiting) if count)
    path: dict[int, None] = {}
    while node not in path:
        path[node] = None
        node = next(other for other in before[node] if waiting[other])
    nodes = list(path)
    return nodes[nodes.index(node) :][::-1]


def _shown(names: list[str]) -> str:
    if len(names) > _LONGEST_CYCLE_SHOWN:
        half = _LONGEST_CYCLE_SHOWN // 2
        names = [*names[:half], f"... {len(names) - 2 * half} more ...", *names[-half:]]
    return " -> ".join(names)
