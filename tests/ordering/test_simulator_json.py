"""Graphs as JSON: what torch exports is read, what we write is the same graph, what is broken is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import functorch.compile
import pytest
import torch
from graph_text import graph
from torch._inductor import memory
from torch.utils._ordered_set import OrderedSet

from order_graphs.shapes import SHAPES
from order_graphs.torch_side import torch_graph
from trainfit.errors import FileFormatError, GraphError
from trainfit.ordering.order_timeline import order_timeline
from trainfit.ordering.ordering_problem import problem_of
from trainfit.ordering.simulator_json import graph_from_json, graph_to_json, load_graph, save_graph


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_written_is_read_again(shape: str, tmp_path: Path) -> None:
    original = SHAPES[shape](5, 60)
    save_graph(original, tmp_path / "graph.json")
    again = load_graph(tmp_path / "graph.json")
    assert problem_of(again) == problem_of(original)
    assert order_timeline(again).live_bytes == order_timeline(original).live_bytes
    assert graph_to_json(again) == graph_to_json(original)


def test_the_keys_are_those_of_the_schema() -> None:
    document = graph_to_json(graph("x : 8 \n a = x : 4/2 \n b = a : 1 output"))
    assert document["nodes"] == [
        {"name": "a", "buffer_names": ["a"]},
        {"name": "b", "buffer_names": ["b"]},
    ]
    assert document["buffers"][1] == {
        "name": "a", "size_alloc": 4, "size_free": 2, "size": 2, "is_input": False, "is_output": False,
        "deps": ["x"], "unmet_deps": [],
    }  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_what_torch_exports_is_the_same_graph(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SHAPES[shape](6, 50)
    exported = exported_by_torch(original, monkeypatch)
    read = graph_from_json(exported)
    assert order_timeline(read).live_bytes == order_timeline(original).live_bytes
    assert sorted(problem_of(read).members) == sorted(problem_of(original).members)


def exported_by_torch(original: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    theirs: Any = torch_graph(original)
    kept: list[str] = []
    monkeypatch.setattr(torch._logging, "trace_structured", lambda *a, **k: kept.append(k["payload_fn"]()))
    monkeypatch.setattr(functorch.compile, "get_graph_being_compiled", lambda: "graph")
    for node in theirs.nodes:
        for buffer in node.outputs:
            buffer.defining_op = node
    fused = {node.name: node for node in theirs.nodes}
    memory.export_graph_for_simulator(
        theirs.nodes, theirs.inputs, fused, OrderedSet(original.inputs), theirs.outputs
    )
    return json.loads(kept[0])


def test_a_file_with_one_size_for_both() -> None:
    buffers = [{"name": "a", "size": 7, "is_output": True}]
    read = graph_from_json({"nodes": [{"name": "n", "buffer_names": ["a"]}], "buffers": buffers})
    assert order_timeline(read).live_bytes == (7, 7)


def test_no_nodes() -> None:
    assert graph_from_json({"nodes": [], "buffers": []}).nodes == ()


NODE = {"name": "n", "buffer_names": ["a"]}
BUFFER = {"name": "a", "size_alloc": 1, "size_free": 1, "is_input": False, "is_output": False, "deps": []}


@pytest.mark.parametrize(
    ("document", "error", "message"),
    [
        ([], FileFormatError, "expected an object, found a list"),
        ({"nodes": []}, FileFormatError, "the field 'buffers' is missing"),
        (
            {"nodes": {}, "buffers": []},
            FileFormatError,
            "nodes: expected a list, found an object",
        ),
        ({"nodes": [3], "buffers": []}, FileFormatError, r"nodes\[0\]: expected an object, found 3"),
        (
            {"nodes": [{"name": "n"}], "buffers": []},
            FileFormatError,
            "the field 'buffer_names' is missing",
        ),
        ({"nodes": [NODE], "buffers": []}, GraphError, "node 'n' makes buffer 'a', but there is no such"),
        ({"nodes": [NODE], "buffers": [BUFFER, BUFFER]}, GraphError, "2 buffers are called 'a'"),
        ({"nodes": [NODE, NODE], "buffers": [BUFFER]}, GraphError, "2 nodes are called 'n'"),
        ({"nodes": [NODE], "buffers": [{**BUFFER, "deps": ["z"]}]}, GraphError, "'n' reads buffer 'z', but"),
        (
            {"nodes": [NODE], "buffers": [{**BUFFER, "deps": [1]}]},
            FileFormatError,
            r"buffers\[0\].deps\[0\]: expected text, found 1",
        ),
        ({"nodes": [NODE], "buffers": [{**BUFFER, "size_free": -1}]}, GraphError, "'a' is negative: -1"),
        (
            {"nodes": [NODE], "buffers": [{**BUFFER, "size_alloc": 1.5}]},
            FileFormatError,
            r"buffers\[0\].size_alloc: expected a whole number, found 1.5",
        ),
        (
            {"nodes": [NODE], "buffers": [{**BUFFER, "is_output": 1}]},
            FileFormatError,
            r"buffers\[0\].is_output: expected true or false, found 1",
        ),
        (
            {"nodes": [NODE], "buffers": [{**BUFFER, "alias_of": 1}]},
            FileFormatError,
            r"buffers\[0\].alias_of: expected text, found 1",
        ),
    ],
)
def test_what_is_wrong_is_named(document: Any, error: type[Exception], message: str, tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(error, match=message) as raised:
        load_graph(file)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize("text", ["", "{", '{"nodes": [', "NaN", "[" * 100_000, "\x00"])
def test_a_file_that_is_not_json(text: str, tmp_path: Path) -> None:
    file = tmp_path / "graph.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(FileFormatError, match="is truncated or not JSON"):
        load_graph(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=r"cannot read .*missing.json: No such file or directory"):
        load_graph(tmp_path / "missing.json")
