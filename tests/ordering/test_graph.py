"""What a graph may be, and what is refused in which words."""

from __future__ import annotations

import pytest
from graph_text import graph

from trainfit.errors import GraphError
from trainfit.ordering.graph import Buffer, BufferGraph, Node
from trainfit.ordering.order_timeline import order_timeline


def test_a_cycle_is_named() -> None:
    with pytest.raises(
        GraphError, match=r"3 nodes wait for each other: (a -> b -> c|b -> c -> a|c -> a -> b)"
    ):
        graph("""
            x =     : 1
            a = x c : 1
            b = a   : 1
            c = b   : 1
        """)


def test_a_cycle_of_ordering_alone_is_one_too() -> None:
    with pytest.raises(GraphError, match=r"2 nodes wait for each other: (a -> b -> a|b -> a -> b)"):
        graph("""
            a =   : 1 after b
            b = a : 1
        """)


def test_a_long_cycle_is_shortened() -> None:
    names = [f"n{number}" for number in range(1000)]
    nodes = tuple(Node(name, (name,), (names[number - 1],)) for number, name in enumerate(names))
    with pytest.raises(
        GraphError, match=r"1000 nodes wait for each other: .* \.\.\. 989 more \.\.\. "
    ) as error:
        BufferGraph(nodes, tuple(Buffer(name, 1, 1) for name in names))
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("nodes", "buffers", "inputs", "message"),
    [
        ([Node("a", ("x",)), Node("a", ("y",))], "x y", "", "2 nodes are called 'a'; names must be unique"),
        ([Node("a", ("x",))], "x x", "", "2 buffers are called 'x'; names must be unique"),
        ([], "x", "x x", "2 inputs are called 'x'"),
        ([Node("a", ("x", "y"))], "x", "", "node 'a' makes buffer 'y', but there is no such buffer"),
        ([Node("a", ("x",), ("y",))], "x", "", "node 'a' reads buffer 'y', but there is no such buffer"),
        ([Node("a", ("x",), (), ("b",))], "x", "", "node 'a' comes after 'b', but there is no such node"),
        ([Node("a", ("x",)), Node("b", ("x",))], "x", "", "buffer 'x' is made twice: by 'a' and 'b'"),
        ([Node("a", ("x",))], "x", "x", "buffer 'x' is an input, but node 'a' makes it"),
        ([Node("a", ("x",))], "x", "y", "'y' is an input, but there is no such buffer"),
        ([], "x", "", "buffer 'x' is made by no node and is no input"),
    ],
)
def test_names_have_to_fit_together(nodes: list[Node], buffers: str, inputs: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        BufferGraph(
            tuple(nodes), tuple(Buffer(name, 1, 1) for name in buffers.split()), tuple(inputs.split())
        )


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (Buffer("x", -5, 1), "size_alloc of buffer 'x' is negative: -5"),
        (Buffer("x", 1, -1), "size_free of buffer 'x' is negative: -1"),
        (Buffer("x", 1.5, 1), "size_alloc of buffer 'x' must be a whole number, got 1.5"),  # type: ignore[arg-type]
        (Buffer("x", True, 1), "size_alloc of buffer 'x' must be a whole number, got True"),
        (Buffer("x", 4, 4, alias_of="x"), "'x' is an alias of 'x' and has a size of its own"),
        (Buffer("x", 0, 0, alias_of="x"), "buffer 'x' is an alias of itself"),
        (Buffer("x", 0, 0, alias_of="y"), "buffer 'x' is an alias of 'y', but there is no such buffer"),
    ],
)
def test_sizes_and_aliases_have_to_make_sense(buffer: Buffer, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        BufferGraph((Node("a", ("x",)),), (buffer,))


def test_a_given_order_that_is_impossible_is_mended() -> None:
    mended = graph("""
        c = b : 1
        b = a : 1
        d =   : 1
        a =   : 1
    """)
    assert [mended.nodes[node].name for node in mended.baseline] == ["a", "b", "c", "d"]
    assert order_timeline(mended).peak_bytes == 2


def test_a_node_that_reads_its_own_result_is_no_cycle() -> None:
    own = BufferGraph((Node("a", ("x",), ("x",)),), (Buffer("x", 3, 3),))
    assert own.predecessors == ((),)
    assert order_timeline(own).live_bytes == (3, 0)
