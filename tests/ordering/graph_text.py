"""Graphs written as text, so that a test shows the whole situation.

One line per node: `name = reads : bytes [output] [alias of NAME] [after NODE ...]`; an input has no `=`.
"""

from __future__ import annotations

from trainfit.ordering.graph import Buffer, BufferGraph, Node


def graph(text: str) -> BufferGraph:
    """Build a graph in which each node makes one buffer of its own name; `a/b` is allocated / released."""
    nodes, buffers, inputs = [], [], []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        left, right = line.split(":")
        words = right.split()
        size_alloc, _, size_free = words[0].partition("/")
        rest = " ".join(words[1:])
        rest, _, after = rest.partition("after ")
        rest, _, alias = rest.partition("alias of ")
        name, makes, reads = (part.strip() for part in left.partition("="))
        output = "output" in rest
        buffers.append(
            Buffer(name, int(size_alloc), int(size_free or size_alloc), output, alias.strip() or None)
        )
        if makes:
            nodes.append(Node(name, (name,), tuple(reads.split()), tuple(after.split())))
        else:
            inputs.append(name)
    return BufferGraph(tuple(nodes), tuple(buffers), tuple(inputs))
