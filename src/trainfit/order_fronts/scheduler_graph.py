"""Inductor's scheduler nodes as a `BufferGraph`: who makes and who reads which buffer, and how big it is.

Memory is counted as inductor counts it when it plans: every buffer of a node is allocated when the node runs.
A kernel with several outputs allocates all of them at once, and each output is released by itself. A buffer
that a kernel changes in place gets a new name and no new memory: whoever uses the new name keeps the original
alive. Of the graph's inputs only those can be released that are no parameters, arguments, tangents or states
of random generators. A dependency that only orders keeps nothing alive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._inductor import ir
from torch._inductor.dependencies import WeakDep
from torch._inductor.scheduler import OutputNode
from torch._inductor.utils import get_dtype_size, is_nonfreeable_buffers
from torch._inductor.virtualized import V

from trainfit.errors import GraphError
from trainfit.ordering.graph import Buffer, BufferGraph, Node

Nodes = list[Any]
"""Nodes of inductor's scheduler, whose types are private to inductor."""


@dataclass(frozen=True)
class BufferUse:
    """Bytes that a buffer adds and releases, and the nodes that come after the node that makes it."""

    size_alloc: int
    size_free: int
    readers: tuple[Any, ...]
    """Those that keep it alive until they have run."""
    followers: tuple[Any, ...]
    """The readers, and those that only have to run later."""


@dataclass
class NodeLinks:
    """What one node has to do with the others. The keys are what matters: sets that keep their order."""

    reads: dict[str, None] = field(default_factory=dict)
    before: dict[Any, None] = field(default_factory=dict)
    after: dict[Any, None] = field(default_factory=dict)


class _Users:
    """The nodes that depend on each buffer, in the order in which they come."""

    def __init__(self) -> None:
        # Dictionaries without values: sets that keep their order.
        self.readers: defaultdict[str, dict[Any, None]] = defaultdict(dict)
        self.followers: defaultdict[str, dict[Any, None]] = defaultdict(dict)

    def add(self, dependency: Any, node: Any) -> None:
        self.followers[dependency.name][node] = None
        if not (isinstance(dependency, WeakDep) and dependency.is_fake):
            self.readers[dependency.name][node] = None

    def rename(self, renamed: str, original: str) -> None:
        """Let whoever uses a buffer under its new name count as a user of the original."""
        self.readers[original] |= self.readers[renamed]
        self.followers[original] |= self.followers[renamed]

    def use(self, name: str, size_alloc: int, size_free: int) -> BufferUse:
        return BufferUse(size_alloc, size_free, tuple(self.readers[name]), tuple(self.followers[name]))


def freeable_inputs(nodes: Iterable[Any], names: Collection[str]) -> dict[str, BufferUse]:
    """Return those of the graph's inputs that can be released once their readers have run."""
    users = _Users()
    sizes: dict[str, int] = {}
    for node in nodes:
        for dependency in node.read_writes.reads:
            if dependency.name in names and not is_nonfreeable_buffers(dependency):
                sizes[dependency.name] = V.graph.get_dep_size_hint(dependency)
                users.add(dependency, node)
    # Inductor gives inputs no size on allocation, because no node of the graph allocates them.
    return {name: users.use(name, 0, size) for name, size in sizes.items()}


def made_buffers(nodes: Iterable[Any], name_to_buf: Mapping[str, Any]) -> dict[str, BufferUse]:
    """Return the sizes and users of all buffers of a scheduler."""
    users = _Users()
    for node in nodes:
        for dependency in node.unmet_dependencies:
            users.add(dependency, node)
    # Backwards, so that the users of what was renamed twice reach the first name.
    for renamed, original in reversed(V.graph.scheduler.mutation_real_name.items()):
        users.rename(renamed, original)
    sizes = buffer_sizes(name_to_buf)
    return {name: users.use(name, *sizes[name]) for name in name_to_buf}


def buffer_sizes(name_to_buf: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the bytes that each buffer and each of their parts adds and releases."""
    known = dict(name_to_buf)
    inside = {}
    for buffer in name_to_buf.values():
        if _has_parts(buffer):
            parts = {part.get_name(): part for part in _parts(buffer)}
            known.update(parts)
            inside.update(parts)
    sizes = {}
    for name, buffer in known.items():
        alloc = 0 if name in inside else _bytes_with_parts(buffer)
        sizes[name] = (alloc, 0 if _has_parts(buffer) else _bytes_with_parts(buffer))
    return sizes


def _bytes_with_parts(buffer: Any) -> int:
    if _is_nothing(buffer):
        return 0
    if _has_parts(buffer):
        parts = {part.get_name(): part for part in _parts(buffer)}
        return sum(_bytes_with_parts(part) for part in parts.values())
    count = V.graph.sizevars.optimization_hint(buffer.node.get_numel(), fallback=0)
    return int(count * get_dtype_size(buffer.node.get_dtype()))


def _is_nothing(buffer: Any) -> bool:
    """Whether a buffer is a new name for other memory, or no memory at all."""
    renamed = buffer.get_name() in V.graph.scheduler.mutation_real_name
    return renamed or isinstance(buffer.node.layout, ir.NoneLayout)


def _has_parts(buffer: Any) -> bool:
    """Whether a buffer stands for several outputs of a kernel, which are buffers too."""
    return not _is_nothing(buffer) and isinstance(buffer.node.layout, ir.MultiOutputLayout)


def _parts(buffer: Any) -> Iterator[Any]:
    for user in buffer.users:
        if not isinstance(user.node, OutputNode):
            yield from (part for part in user.node.get_outputs() if isinstance(part.node, ir.MultiOutput))


def links_of(
    nodes: Sequence[Any], made: Mapping[str, BufferUse], inputs: Mapping[str, BufferUse]
) -> dict[Any, NodeLinks]:
    """Return which buffers each node reads and which nodes come before and after it; never itself."""
    links = {node: NodeLinks() for node in nodes}
    producers = [(node, buffer.get_name()) for node in nodes for buffer in node.get_outputs()]
    for node, name in producers:
        for follower in made[name].followers:
            found = _known(links, follower, name)
            if follower is not node:
                found.before[node] = None
                links[node].after[follower] = None
    for name, use in (*((name, made[name]) for _, name in producers), *inputs.items()):
        for reader in use.readers:
            _known(links, reader, name).reads[name] = None
    return links


def _known(links: dict[Any, NodeLinks], node: Any, buffer: str) -> NodeLinks:
    if node not in links:
        name = node.get_name()
        raise GraphError(f"node {name!r} uses buffer {buffer!r}, but is not among the {len(links)} nodes.")
    return links[node]


def graph_of_uses(
    nodes: Sequence[Any],
    made: Mapping[str, BufferUse],
    inputs: Mapping[str, BufferUse],
    outputs: Collection[str],
) -> BufferGraph:
    """Return the graph of scheduler nodes in their order; refuse cycles and names that occur twice."""
    links = links_of(nodes, made, inputs)
    producer = {buffer.get_name(): node for node in nodes for buffer in node.get_outputs()}
    buffers = [Buffer(name, use.size_free, use.size_free, name in outputs) for name, use in inputs.items()]
    found = []
    for node in nodes:
        names = tuple(buffer.get_name() for buffer in node.get_outputs())
        buffers += [
            Buffer(name, made[name].size_alloc, made[name].size_free, name in outputs) for name in names
        ]
        read = {producer.get(name) for name in links[node].reads}
        after = tuple(other.get_name() for other in links[node].before if other not in read)
        found.append(Node(node.get_name(), names, tuple(links[node].reads), after))
    return BufferGraph(tuple(found), tuple(buffers), tuple(inputs))
