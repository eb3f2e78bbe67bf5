"""Orders against every possible order, against torch, and against what they promise."""

from __future__ import annotations

import time

import pytest
from graph_text import graph
from hypothesis import given, settings
from hypothesis import strategies as st

from order_graphs.brute_force import smallest_peak
from order_graphs.shapes import SHAPES, GraphBuilder
from trainfit.errors import OptionError
from trainfit.ordering.best_order import TORCH_METHODS, best_order
from trainfit.ordering.graph import BufferGraph
from trainfit.ordering.order_timeline import order_timeline

shapes = st.sampled_from(sorted(SHAPES))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 10))
def test_small_graphs_get_the_smallest_peak_and_the_proof(seed: int, count: int) -> None:
    small = SHAPES["anything"](seed, count)
    found = best_order(small)
    assert found.peak_bytes == found.lower_bound_bytes == smallest_peak(small)
    assert found.quality == "optimal"


@settings(max_examples=25, deadline=None)
@given(shapes, st.integers(0, 2**32), st.integers(10, 120))
def test_every_order_is_possible_never_worse_and_not_below_the_bound(
    shape: str, seed: int, count: int
) -> None:
    some = SHAPES[shape](seed, count)
    found = best_order(some)
    assert order_timeline(some, found.names).peak_bytes == found.peak_bytes  # refuses impossible orders
    assert found.lower_bound_bytes <= found.peak_bytes
    assert found.peak_bytes <= min(found.methods[method] for method in TORCH_METHODS)
    assert found.peak_bytes == min(found.methods.values()) == found.methods[found.method]
    assert best_order(some) == found, "the same graph has to give the same result"


def test_the_order_of_two_branches_matters() -> None:
    found = best_order(
        graph("""
            x =      : 1
            a = x    : 100
            b = x    : 100
            c = a    : 1
            d = b    : 1
            y = c d  : 1 output
        """)
    )
    assert found.baseline_peak_bytes == 201  # both branches at once
    assert found.peak_bytes == 102  # one branch after the other
    assert found.optimal
    assert order_timeline(found.reordered()).peak_bytes == 102


def test_a_good_order_is_left_alone() -> None:
    good = graph("a = : 5 \n b = a : 5 \n c = b : 5 output")
    found = best_order(good)
    assert (found.method, found.names) == ("baseline", ("a", "b", "c"))


def test_no_nodes_at_all() -> None:
    found = best_order(BufferGraph((), ()))
    assert (found.names, found.peak_bytes, found.lower_bound_bytes, found.optimal) == ((), 0, 0, True)
    assert best_order(graph("x : 9")).peak_bytes == 9


def test_a_time_limit_ends_the_search() -> None:
    hard = SHAPES["layered"](101, 2000)
    begin = time.perf_counter()
    found = best_order(hard, seconds=0.1)
    assert time.perf_counter() - begin < 5.0
    assert found.peak_bytes <= min(found.methods[method] for method in TORCH_METHODS)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(OptionError, match="time limit must be a number of seconds above zero"):
            best_order(hard, seconds=wrong)


def test_a_time_limit_goes_beyond_the_default_effort() -> None:
    hard = SHAPES["anything"](10, 50)
    assert not best_order(hard).optimal
    assert best_order(hard, seconds=60.0).optimal


def test_the_promise_is_rounded_up() -> None:
    hard = best_order(SHAPES["layered"](101, 60))
    promised = float(hard.quality.removeprefix("within ").split(" ")[0]) / 100
    assert hard.gap <= promised < hard.gap + 0.002


def test_two_hundred_thousand_nodes() -> None:
    build = GraphBuilder(0)
    ends = []
    for _ in range(40_000):
        end = build.add([])
        for _ in range(3):
            end = build.add([end])
        ends.append(build.add([end], size=1))
    huge = build.finish(ends)
    assert len(huge.nodes) == 200_000
    found = best_order(huge)
    assert found.peak_bytes <= min(found.methods[method] for method in TORCH_METHODS)


def test_a_chain_as_long_as_that() -> None:
    build = GraphBuilder(1)
    end = build.add([], size=2)
    for _ in range(50_000):
        end = build.add([end], size=2)
    assert best_order(build.finish([end])).quality == "optimal"
