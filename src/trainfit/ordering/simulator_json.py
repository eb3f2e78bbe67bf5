"""Graphs as JSON in the schema that inductor exports for its simulator, read and written.

`{"nodes": [{"name", "buffer_names"}], "buffers": [{"name", "size_alloc", "size_free", "size", "is_input",
"is_output", "deps", "unmet_deps"}]}`: the `deps` of a buffer are the buffers that its node reads, with those
whose memory it reads under another name; `unmet_deps` are those of them that are no inputs. What the schema
has no place for is in keys that other readers may ignore: `alias_of` of a buffer, `after` of a node (nodes it
has to follow without reading anything), and `deps` of a node that makes no buffer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfit.basics.decoding import Malformed, decode
from trainfit.basics.sealed_files import read_json, write_whole
from trainfit.errors import FileFormatError, GraphError
from trainfit.ordering.graph import Buffer, BufferGraph, Node


@dataclass(frozen=True, slots=True)
class _NodeEntry:
    name: str
    buffer_names: tuple[str, ...]
    deps: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _BufferEntry:
    name: str
    size_alloc: int | None = None
    size_free: int | None = None
    size: int | None = None
    """Files written before the two sizes were told apart have one for both."""
    is_input: bool = False
    is_output: bool = False
    deps: tuple[str, ...] = ()
    unmet_deps: tuple[str, ...] = ()
    alias_of: str | None = None


@dataclass(frozen=True)
class _Document:
    nodes: tuple[_NodeEntry, ...]
    buffers: tuple[_BufferEntry, ...]


def load_graph(path: str | Path) -> BufferGraph:
    """Read a graph; whatever is wrong with the file or the graph is one clear error."""
    document = read_json(Path(path))
    try:
        return graph_from_json(document)
    except (FileFormatError, GraphError) as error:
        raise type(error)(f"{path}: {error}") from None


def save_graph(graph: BufferGraph, path: str | Path) -> None:
    """Write a graph, whole or not at all."""
    write_whole(Path(path), (json.dumps(graph_to_json(graph), indent=2) + "\n").encode())


def graph_from_json(document: Any) -> BufferGraph:
    """Return the graph that a parsed JSON document describes."""
    try:
        read = decode(_Document, document, defaults=True, surplus=True)
    except Malformed as error:
        raise FileFormatError(f"{error}.") from None
    deps = {entry.name: entry.deps + entry.unmet_deps for entry in read.buffers}
    return BufferGraph(
        nodes=tuple(_node(entry, deps) for entry in read.nodes),
        buffers=tuple(_buffer(entry, number) for number, entry in enumerate(read.buffers)),
        inputs=tuple(entry.name for entry in read.buffers if entry.is_input),
    )


def graph_to_json(graph: BufferGraph) -> dict[str, Any]:
    """Return a graph as JSON, its nodes in their order."""
    inputs = set(graph.inputs)
    nodes: list[dict[str, Any]] = []
    for number, node in enumerate(graph.nodes):
        entry: dict[str, Any] = {"name": node.name, "buffer_names": list(node.buffers)}
        if node.after:
            entry["after"] = list(node.after)
        if not node.buffers and node.reads:
            entry["deps"] = [graph.buffers[read].name for read in graph.reads[number]]
        nodes.append(entry)
    buffers: list[dict[str, Any]] = []
    for number, buffer in enumerate(graph.buffers):
        producer = graph.producer[number]
        read = [graph.buffers[other].name for other in graph.reads[producer]] if producer >= 0 else []
        buffers.append(
            {
                "name": buffer.name,
                "size_alloc": buffer.size_alloc,
                "size_free": buffer.size_free,
                "size": buffer.size_free,
                "is_input": buffer.name in inputs,
                "is_output": buffer.output,
                "deps": read,
                "unmet_deps": [name for name in read if name not in inputs],
            }
        )
        if buffer.alias_of is not None:
            buffers[-1]["alias_of"] = buffer.alias_of
    return {"nodes": nodes, "buffers": buffers}


def _node(entry: _NodeEntry, deps: dict[str, tuple[str, ...]]) -> Node:
    reads = entry.deps + tuple(read for buffer in entry.buffer_names for read in deps.get(buffer, ()))
    own = set(entry.buffer_names)
    kept = dict.fromkeys(read for read in reads if read not in own)
    return Node(entry.name, entry.buffer_names, tuple(kept), entry.after)


def _buffer(entry: _BufferEntry, number: int) -> Buffer:
    alloc = entry.size if entry.size_alloc is None else entry.size_alloc
    free = entry.size if entry.size_free is None else entry.size_free
    if alloc is None or free is None:
        missing = "size_alloc" if alloc is None else "size_free"
        raise FileFormatError(f"buffers[{number}]: the field {missing!r} is missing.")
    return Buffer(entry.name, alloc, free, output=entry.is_output, alias_of=entry.alias_of)
