"""Timelines against values computed by hand, one rule each."""

from __future__ import annotations

import pytest
from graph_text import graph

from trainfit.errors import GraphError
from trainfit.ordering.order_timeline import Lifetime, order_timeline


def test_memory_is_counted_with_the_results_and_before_anything_is_released() -> None:
    found = order_timeline(
        graph("""
            a =     : 10
            b = a   : 20
            c = a b : 5 output
        """)
    )
    assert found.live_bytes == (10, 30, 35, 5)
    assert found.after_alloc == (10, 30, 35)
    assert found.after_free == (10, 30, 5)
    assert found.peak_bytes == 35
    assert found.lifetimes[0] == Lifetime("a", 10, 10, start=0, end=2, last_user="c")
    assert found.lifetimes[2] == Lifetime("c", 5, 5, start=2, end=None, last_user=None)


def test_an_input_is_alive_from_the_start_and_released_after_its_last_reader() -> None:
    found = order_timeline(
        graph("""
            x         : 100
            unread    : 7
            a = x     : 1
            b = a     : 2 output
        """)
    )
    assert found.initial_bytes == 107
    assert found.live_bytes == (108, 10, 9)


def test_an_input_that_is_an_output_stays() -> None:
    assert order_timeline(graph("x : 100 output \n a = x : 1")).live_bytes == (101, 100)


def test_what_nobody_reads_is_released_by_its_own_node() -> None:
    assert order_timeline(graph("a = : 5 \n b = : 6")).live_bytes == (5, 6, 0)


def test_readers_of_a_new_name_keep_the_original() -> None:
    found = order_timeline(
        graph("""
            a =     : 10
            m = a   : 0 alias of a
            n = m   : 0 alias of m
            b =     : 20
            c = n b : 1 output
        """)
    )
    assert found.live_bytes == (10, 10, 10, 30, 31, 1)


def test_an_output_under_a_new_name_keeps_the_original() -> None:
    found = order_timeline(graph("a = : 10 \n m = a : 0 output alias of a \n b = m : 1"))
    assert found.live_bytes == (10, 10, 11, 10)


def test_several_outputs_are_allocated_together_and_released_one_by_one() -> None:
    found = order_timeline(
        graph("""
            whole =      : 30/0
            p = whole    : 0/10
            q = whole    : 0/20
            r = p        : 1
            s = q r      : 2 output
        """)
    )
    assert found.live_bytes == (30, 30, 30, 31, 23, 2)


def test_ordering_alone_keeps_nothing_alive() -> None:
    found = order_timeline(graph("a = : 10 \n b = a : 1 output \n c = : 5 output after a"))
    assert found.live_bytes == (10, 11, 6, 6)


def test_a_graph_without_nodes_has_a_timeline() -> None:
    assert order_timeline(graph("")).live_bytes == (0,)
    assert order_timeline(graph("x : 9")).peak_bytes == 9


def test_an_order_that_is_none_is_refused() -> None:
    two = graph("a = : 1 \n b = a : 1")
    with pytest.raises(GraphError, match="the order runs 'b' before 'a', which it needs"):
        order_timeline(two, ["b", "a"])
    with pytest.raises(GraphError, match="each of the 2 nodes once, this one 1"):
        order_timeline(two, ["a"])
    with pytest.raises(GraphError, match="the order names 'z', but there is no such node"):
        order_timeline(two, ["a", "z"])
