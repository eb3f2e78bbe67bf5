"""FX graphs: what their nodes allocate and release, and the same graph in another order.

A node allocates the storages of its results that no earlier node has; a view or a result that an operator
writes in place is another name for the storage it shares. A `GraphModule` forgets each value after its last
use, so that the peak counted here is the one a run has. Placeholders belong to the caller and attributes to
the module: they are never released, unless the caller names placeholders that it gives away.

What may not change places stays in order: random operators draw from one stream, operators with side effects
have an order of their own, and what reads a storage stays before or after what writes it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from trainfit.capturing.schemas import describe
from trainfit.errors import GraphError
from trainfit.ordering import graph as buffers
from trainfit.ordering.best_order import best_order
from trainfit.ordering.found_order import Order
from trainfit.ordering.graph import BufferGraph

_RUNS = ("call_function", "call_method", "call_module")


def buffer_graph(module: GraphModule, freeable: Collection[str] = ()) -> BufferGraph:
    """Return what can be scheduled in a module's graph; every tensor node must have its `meta["val"]`.

    `freeable` are placeholders that the caller gives away, such as the activations saved for a backward.
    """
    return _FxReader(module, frozenset(freeable)).read()


def reorder(
    module: GraphModule, freeable: Collection[str] = (), *, seconds: float | None = None
) -> tuple[GraphModule, Order]:
    """Return a module that computes the same in the order with the smallest peak, and that order."""
    order = best_order(buffer_graph(module, freeable), seconds=seconds)
    return in_order(module, order.names), order


def in_order(module: GraphModule, names: Collection[str]) -> GraphModule:
    """Return a module that runs the graph's nodes in the order of their names."""
    position = {name: place for place, name in enumerate(names)}
    nodes = list(module.graph.nodes)
    first = [node for node in nodes if node.op == "placeholder"]
    first += [node for node in nodes if node.op == "get_attr"]
    running = sorted((n for n in nodes if n.op in _RUNS), key=lambda node: position[node.name])
    last = [node for node in nodes if node.op == "output"]
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in (*first, *running, *last):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.set_codegen(module.graph._codegen)
    graph.lint()
    return GraphModule(module, graph)


class _FxReader:
    """Goes through the nodes in order and notes who made, reads and writes each storage."""

    def __init__(self, module: GraphModule, freeable: frozenset[str]) -> None:
        self._nodes: list[Node] = list(module.graph.nodes)
        self._freeable = freeable
        self._buffers: dict[str, buffers.Buffer] = {}
        self._inputs: list[str] = []
        self._root: dict[int, str] = {}
        """The buffer that owns each storage; empty for storages that the caller owns."""
        self._made_by: dict[Node, dict[int, str]] = {}
        """For each node the buffer that stands for each storage in its result."""
        self._last_writer: dict[int, str] = {}
        self._readers: dict[int, list[str]] = {}
        self._last_in_line: dict[str, str] = {}
        """The last random operator, and the last one with side effects."""

    def read(self) -> BufferGraph:
        unknown = self._freeable - {node.name for node in self._nodes if node.op == "placeholder"}
        if unknown:
            raise GraphError(f"there is no placeholder {sorted(unknown)[0]!r} that could be freed.")
        found = []
        for node in self._nodes:
            if node.op in ("placeholder", "get_attr"):
                self._own(node)
            elif node.op in _RUNS:
                found.append(self._run(node))
        outputs = self._output_names()
        made = tuple(replace(b, output=b.name in outputs) for b in self._buffers.values())
        return BufferGraph(tuple(found), made, tuple(self._inputs))

    def _own(self, node: Node) -> None:
        """Note what exists before the graph runs."""
        for storage, size in _storages(node):
            if node.name in self._freeable and storage not in self._root:
                self._buffers[node.name] = buffers.Buffer(node.name, size, size)
                self._inputs.append(node.name)
                self._root[storage] = node.name
            else:
                self._root.setdefault(storage, "")

    def _run(self, node: Node) -> buffers.Node:
        made = self._results(node)
        reads: list[str] = []
        after: list[str] = []
        written = _written_storages(node)
        for storage, name in self._storages_read(node):
            reads += [name] if name else []
            after += [self._last_writer[storage]] if storage in self._last_writer else []
            if storage in written:
                after += self._readers.get(storage, [])
                self._readers[storage] = []
                self._last_writer[storage] = node.name
            else:
                self._readers.setdefault(storage, []).append(node.name)
        for line in _lines(node):
            after += [self._last_in_line[line]] if line in self._last_in_line else []
            self._last_in_line[line] = node.name
        # Values without memory, such as sizes, order their users all the same.
        after += [source.name for source in node.all_input_nodes if source.op in _RUNS]
        waits = dict.fromkeys(name for name in after if name != node.name)
        return buffers.Node(node.name, tuple(made), tuple(dict.fromkeys(reads)), tuple(waits))

    def _results(self, node: Node) -> list[str]:
        """Note the buffers of a node's result: new storages, and other names for known ones."""
        names: dict[int, str] = {}
        for storage, size in _storages(node):
            if storage in names:
                continue
            name = f"{node.name}.{len(names)}" if names else node.name
            root = self._root.get(storage)
            if root is None:
                self._buffers[name] = buffers.Buffer(name, size, size)
                self._root[storage] = name
            else:
                self._buffers[name] = buffers.Buffer(name, 0, 0, alias_of=root or None)
            names[storage] = name
        self._made_by[node] = names
        return list(names.values())

    def _storages_read(self, node: Node) -> Iterator[tuple[int, str]]:
        """Yield the storages that a node reads, each under the name that its argument has for it."""
        for source in node.all_input_nodes:
            chosen = _storages(node) if _picks(node) else _storages(source)
            of_source = self._made_by.get(source, {})
            for storage, _ in chosen:
                yield storage, of_source.get(storage, self._root.get(storage, ""))

    def _output_names(self) -> set[str]:
        output = next(node for node in self._nodes if node.op == "output")
        found = set()
        for source in output.all_input_nodes:
            named = self._made_by.get(source, {})
            found |= {named.get(storage) or self._root.get(storage, "") for storage, _ in _storages(source)}
        return found - {""}


def _picks(node: Node) -> bool:
    """Whether the node only takes one of several results, so that it keeps no other one alive."""
    return node.op == "call_function" and node.target is operator.getitem


def _storages(node: Node) -> list[tuple[int, int]]:
    """Return the storages of a node's result, each with its bytes."""
    if "val" not in node.meta:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.returns:
            raise GraphError(
                f"node {node.name!r} does not say what it returns; trace the graph with fake tensors, "
                'so that every node has its meta["val"].'
            )
        return []
    found = []
    for tensor in _tensors(node.meta["val"]):
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        # A size that is a symbol counts with the value that it was traced with.
        found.append((storage._cdata, int(size) if isinstance(size, int) else int(size.node.hint or 0)))
    return found


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if torch._C._has_storage(value):
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _written_storages(node: Node) -> set[int]:
    """Return the storages of the arguments that the operator's schema says it writes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return set()
    found: set[int] = set()
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        for source in value if isinstance(value, tuple | list) else (value,):
            if isinstance(source, Node):
                found |= {storage for storage, _ in _storages(source)}
    return found


def _lines(node: Node) -> Iterator[str]:
    """Yield the queues in which a node keeps its place."""
    if isinstance(node.target, torch._ops.OpOverload) and describe(node.target).random:
        yield "random"
    if node.is_impure():
        yield "effects"
