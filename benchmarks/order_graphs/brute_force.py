"""The smallest possible peak by trying every order: for graphs of at most some fifteen nodes.

Written without anything of the engine's: memory is counted from the graph's own buffers for every set of
nodes that can have run, and the best way to reach each set is kept.
"""

from __future__ import annotations

from trainfit.ordering.graph import BufferGraph


def smallest_peak(graph: BufferGraph) -> int:
    """Return the smallest peak of any order of the graph."""
    everything = frozenset(range(len(graph.nodes)))
    before = _predecessors(graph)
    best: dict[frozenset[int], int] = {frozenset(): _memory(graph, frozenset())}
    for _ in everything:
        following: dict[frozenset[int], int] = {}
        for done, peak in best.items():
            memory = _memory(graph, done)
            for node in everything - done:
                if before[node] <= done:
                    needed = max(peak, memory + _allocated(graph, node))
                    reached = done | {node}
                    following[reached] = min(needed, following.get(reached, needed))
        best = following
    return best[everything]


def _predecessors(graph: BufferGraph) -> list[set[int]]:
    maker = {name: number for number, node in enumerate(graph.nodes) for name in node.buffers}
    named = {node.name: number for number, node in enumerate(graph.nodes)}
    return [
        {maker[name] for name in node.reads if name in maker} | {named[name] for name in node.after}
        for node in graph.nodes
    ]


def _original(graph: BufferGraph, name: str) -> str:
    alias = {buffer.name: buffer.alias_of for buffer in graph.buffers}
    while (other := alias[name]) is not None:
        name = other
    return name


def _allocated(graph: BufferGraph, node: int) -> int:
    size = {buffer.name: buffer.size_alloc for buffer in graph.buffers}
    return sum(size[name] for name in graph.nodes[node].buffers)


def _memory(graph: BufferGraph, done: frozenset[int]) -> int:
    """Count what is alive after a set of nodes has run."""
    inputs = set(graph.inputs)
    outputs = {_original(graph, buffer.name) for buffer in graph.buffers if buffer.output}
    total = sum(buffer.size_free for buffer in graph.buffers if buffer.name in inputs)
    total += sum(_allocated(graph, node) for node in done)
    for buffer in graph.buffers:
        if buffer.name in outputs or buffer.alias_of is not None:
            continue
        readers = {
            number
            for number, node in enumerate(graph.nodes)
            if any(_original(graph, name) == buffer.name for name in (*node.reads, *node.buffers))
        }
        if readers and readers <= done:
            total -= buffer.size_free
    return total
