"""Buffers that inductor keeps for later ones of their kind, against memory counted by hand."""

from __future__ import annotations

from graph_text import graph

from trainfit.order_fronts.reuse import live_bytes_with_reuse
from trainfit.ordering.graph import BufferGraph

STEPS = """
    a =   : 10
    b = a : 1
    c = b : 10
    d = c : 1 output
"""


def live(text: str, kinds: dict[str, str], planned: BufferGraph | None = None) -> list[int]:
    precise = graph(text)
    return live_bytes_with_reuse(planned or precise, precise, range(len(precise.nodes)), kinds, kinds)


def test_without_anything_of_the_same_kind_it_is_the_timeline() -> None:
    assert live(STEPS, {}) == [10, 11, 11, 11]
    assert live(STEPS, {"a": "float", "c": "int"}) == [10, 11, 11, 11]


def test_what_is_taken_over_at_once_costs_nothing() -> None:
    assert live(STEPS, {"a": "float", "c": "float"}) == [10, 11, 11, 11]


def test_what_is_kept_for_later_stays_allocated() -> None:
    waiting = """
        a =     : 10
        b = a   : 1
        x = b   : 1
        y = x   : 1
        c = y   : 10
        d = c   : 15 output
    """
    assert live(waiting, {}) == [10, 11, 2, 2, 11, 25]
    assert live(waiting, {"a": "float", "c": "float"}) == [10, 11, 12, 12, 11, 25]


def test_nothing_is_kept_that_would_raise_the_peak() -> None:
    high_between = """
        a =     : 10
        b = a   : 1
        x = b   : 20
        y = x   : 1
        c = y   : 10
        d = c   : 1 output
    """
    assert live(high_between, {}) == [10, 11, 21, 21, 11, 11]
    assert live(high_between, {"a": "float", "c": "float"}) == [10, 11, 21, 21, 11, 11]


def test_the_peak_is_the_one_that_inductor_counts() -> None:
    counted = graph("""
        a =     : 10
        b = a   : 1
        x = b   : 20
        y = x   : 1
        c = y   : 10
        d = c   : 40 output
    """)
    precise = """
        a =     : 10
        b = a   : 1
        x = b   : 20
        y = x   : 1
        c = y   : 10
        d = c   : 1 output
    """
    assert live(precise, {"a": "float", "c": "float"}, counted) == [10, 11, 31, 31, 11, 11]
