"""Graphs as JSON in the schema that inductor exports for its simulator, read and written.

`{"nodes": [{"name", "buffer_names"}], "buffers": [{"name", "size_alloc", "size_free", "size", "is_input",
"is_output", "deps", "unmet_deps"}]}`: the `deps` of a buffer are the buffers that its node reads, with those
whose memory it reads under another name; `unmet_deps` are those of them that are no inputs. What the schema
has no place for is in keys that other readers may ignore: `alias_of` of a buffer, `after` of a node (nodes it
has to follow without reading anything), and `deps` of a node that makes no buffer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from trainfit.errors import FileFormatError, GraphError
from trainfit.ordering.graph import Buffer, BufferGraph, Node
from trainfit.store import write_whole


def load_graph(path: str | Path) -> BufferGraph:
    """Read a graph; whatever is wrong with the file or the graph is one clear error."""
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise FileFormatError(f"cannot read {path}: {reason}.") from None
    try:
        document = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise FileFormatError(f"{path} is truncated or not JSON.") from None
    try:
        return graph_from_json(document)
    except (FileFormatError, GraphError) as error:
        raise type(error)(f"{path}: {error}") from None


def save_graph(graph: BufferGraph, path: str | Path) -> None:
    """Write a graph, whole or not at all."""
    write_whole(Path(path), (json.dumps(graph_to_json(graph), indent=2) + "\n").encode())


def graph_from_json(document: Any) -> BufferGraph:
    """Return the graph that a parsed JSON document describes."""
    nodes = _field(document, "nodes", list, "the graph")
    entries = _field(document, "buffers", list, "the graph")
    deps: dict[str, list[str]] = {}
    buffers = []
    for number, entry in enumerate(entries):
        buffer = _buffer(entry, f"buffer {number}")
        where = f"buffer {buffer.name!r}"
        deps[buffer.name] = _names(entry, "deps", where) + _names(entry, "unmet_deps", where)
        buffers.append(buffer)
    inputs = [b.name for b, entry in zip(buffers, entries) if _flag(entry, "is_input", b.name)]
    return BufferGraph(
        nodes=tuple(_node(entry, f"node {number}", deps) for number, entry in enumerate(nodes)),
        buffers=tuple(buffers),
        inputs=tuple(inputs),
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


def _node(entry: Any, where: str, deps: dict[str, list[str]]) -> Node:
    name = _field(entry, "name", str, where)
    where = f"node {name!r}"
    made = _names(entry, "buffer_names", where, required=True)
    reads = _names(entry, "deps", where) + [read for buffer in made for read in deps.get(buffer, ())]
    own = set(made)
    kept = dict.fromkeys(read for read in reads if read not in own)
    return Node(name, tuple(made), tuple(kept), tuple(_names(entry, "after", where)))


def _buffer(entry: Any, where: str) -> Buffer:
    name = _field(entry, "name", str, where)
    where = f"buffer {name!r}"
    # Files written before the two sizes were told apart have one for both.
    size_alloc = _field(entry, "size_alloc" if "size_alloc" in entry else "size", int, where)
    size_free = _field(entry, "size_free" if "size_free" in entry else "size", int, where)
    alias = entry.get("alias_of")
    if alias is not None and type(alias) is not str:
        raise FileFormatError(f"alias_of of {where} should be of type str, not {type(alias).__name__}.")
    return Buffer(name, size_alloc, size_free, output=_flag(entry, "is_output", name), alias_of=alias)


def _flag(entry: dict[str, Any], key: str, name: str) -> bool:
    return bool(_field(entry, key, bool, f"buffer {name!r}")) if key in entry else False


def _names(entry: dict[str, Any], key: str, where: str, *, required: bool = False) -> list[str]:
    if key not in entry and not required:
        return []
    found: list[str] = _field(entry, key, list, where)
    for name in found:
        if type(name) is not str:
            raise FileFormatError(f"{key} of {where} should be a list of names, but has {name!r}.")
    return found


def _field(entry: Any, key: str, kind: type, where: str) -> Any:
    if type(entry) is not dict:
        raise FileFormatError(f"{where} should be a JSON object, not {type(entry).__name__}.")
    if key not in entry:
        raise FileFormatError(f"{where} has no {key!r}.")
    if type(entry[key]) is not kind:
        found = type(entry[key]).__name__
        raise FileFormatError(f"{key} of {where} should be of type {kind.__name__}, not {found}.")
    return entry[key]


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")
