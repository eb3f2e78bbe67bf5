"""Replays against timelines computed by hand, and against a loop that counts bytes one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_text import count_live_bytes, trace

from trainfit.traces.simulate import AliveStorage, simulate
from trainfit.traces.trace import CATEGORIES, Interval, Op, Signature, Storage, Trace


def by_category(**named: int) -> dict[str, int]:
    return dict.fromkeys(CATEGORIES, 0) | named


CHAIN = """
    x            : 400 held
    a = gelu(x)  : 400
    b = gelu(a)  : 400
    y = sum(b)   :   4 output
"""


def test_results_count_while_their_op_runs_and_die_after_their_last_use() -> None:
    timeline = simulate(trace(CHAIN))
    assert timeline.live_bytes == (800, 1200, 804)
    assert (timeline.peak_bytes, timeline.peak_op) == (1200, 1)
    assert timeline.persistent_bytes == 400


def test_autograd_keeps_what_it_saved_until_backward_has_read_it() -> None:
    timeline = simulate(
        trace("""
            w              :  10 held parameter
            a = mul(w)     : 100 saved
            b = mul(a)     : 100 saved
            y = sum(b)     :   1 output
            -- backward
            e = ones(y)    :   1
            d = back(e, b) : 100
            g = back(d, a) :  10 gradient output
        """)
    )
    #                              w   a    b    y  e   d    g
    assert timeline.live_bytes == (
        10 + 100,
        10 + 100 + 100,
        10 + 100 + 100 + 1,
        10 + 100 + 100 + 1 + 1,
        10 + 100 + 100 + 1 + 1 + 100,
        10 + 100 + 1 + 100 + 10,
    )
    assert timeline.peak_op == 4


def test_views_and_in_place_ops_make_nothing() -> None:
    timeline = simulate(
        trace("""
            x           : 8 held
            a = neg(x)  : 8
            v = view(a)
            v += add(x)
            y = sum(v)  : 1 output
        """)
    )
    assert timeline.live_bytes == (16, 16, 16, 17)  # the view keeps a's storage alive


def test_what_was_there_before_can_die_in_the_step() -> None:
    timeline = simulate(
        trace("""
            old         : 100
            unused      :  50
            y = neg(old):   4 output
            z = neg(y)  :   4 output
        """)
    )
    assert timeline.live_bytes == (104, 8)
    assert timeline.persistent_bytes == 150  # what nothing uses is gone before the first op


# Resizes ------------------------------------------------------------------------------------------------


def test_a_storage_that_is_resized() -> None:
    """As FSDP does: gathered before its layer, freed after it, gathered again."""
    timeline = simulate(
        trace("""
            w           :   0 held parameter
            x           :  10 held
            a = neg(x)  :  10
            w -> 100
            b = mm(a, w):  10
            w -> 0
            c = neg(b)  :  10
            w -> 100
            w -> 60
            y = mm(c, w):  10 output
        """)
    )
    assert timeline.live_bytes == (20, 10 + 10 + 100 + 10, 30, 10 + 10 + 60 + 10)
    assert timeline.by_category[CATEGORIES.index("parameter")].tolist() == [0, 100, 0, 60]
    assert timeline.alive_at_peak[0] == AliveStorage(0, 100, "parameter", "", "Global")


def test_a_resize_after_the_last_op_does_not_count() -> None:
    timeline = simulate(
        trace("""
            x           : 10 held
            y = neg(x)  : 10 output
            y -> 1000
        """)
    )
    assert timeline.live_bytes == (20,)


def test_a_resize_before_the_first_op_is_not_part_of_what_was_there() -> None:
    timeline = simulate(
        trace("""
            x           : 10 held
            x -> 30
            y = neg(x)  :  4 output
        """)
    )
    assert (timeline.persistent_bytes, timeline.live_bytes) == (10, (34,))


# The peak -----------------------------------------------------------------------------------------------


def test_a_workspace_counts_at_the_peak_but_is_not_alive() -> None:
    timeline = simulate(
        trace("""
            x           : 100 held
            a = mm(x)   : 100 workspace 64
            b = neg(a)  : 100
            y = sum(b)  :   4 output workspace 300
        """)
    )
    assert timeline.live_bytes == (200, 300, 204)
    assert timeline.workspace_bytes.tolist() == [64, 0, 300]
    assert timeline.used_bytes.tolist() == [264, 300, 504]
    assert [timeline.most_bytes(first, 2) for first in (0, 1, 2)] == [300, 300, 0]
    assert timeline.categories_at(0) == by_category(input=100, activation=100, temporary=64)
    assert (timeline.peak_bytes, timeline.peak_op) == (504, 2)
    assert timeline.peak_by_category == by_category(input=100, activation=104, temporary=300)


def test_of_equal_peaks_the_first_counts() -> None:
    timeline = simulate(
        trace("""
            x           : 100
            a = neg(x)  : 100
            b = neg(a)  : 100
        """)
    )
    assert timeline.live_bytes == (200, 200)
    assert timeline.peak_op == 0


def test_a_step_that_never_rises_above_what_was_there() -> None:
    timeline = simulate(
        trace("""
            x           : 100
            w           :  10 held parameter
            w += neg(x)
            y = neg(w)  :   4
        """)
    )
    assert timeline.live_bytes == (110, 14)
    assert (timeline.peak_bytes, timeline.peak_op) == (110, -1)
    assert timeline.peak_by_category == by_category(input=100, parameter=10)
    assert [alive.storage for alive in timeline.alive_at_peak] == [0, 1]
    assert timeline.peak_by_module == {}


def test_bytes_at_the_peak_by_category() -> None:
    timeline = simulate(
        trace("""
            w              :  10 held parameter
            m              :  20 held optimizer_state
            n              :   3 held buffer
            x              :   5 held
            a = mm(x, w)   : 100 saved
            t = reduce(a)  :   7 communication output
            -- backward
            g = mm(a, x)   :  10 gradient
            h = scale(g)   :  11
            -- optimizer
            m += add(h)
        """)
    )
    assert timeline.peak_op == 2
    expected = {"parameter": 10, "optimizer_state": 20, "buffer": 3, "input": 5, "communication": 7}
    assert timeline.peak_by_category == by_category(**expected, activation=100, gradient=10)
    assert tuple(timeline.peak_by_category) == CATEGORIES


def test_what_is_alive_at_the_peak_with_its_producer_and_module() -> None:
    timeline = simulate(
        trace("""
            w              :  10 held parameter @Net.a
            a = mm(w)      : 100                @Net.a
            b = gelu(a)    : 300                @Net.b
            c = gelu(a)    :  50                @Net.b
            d = cat(b, c)  : 350
            y = sum(d)     :   4 output
        """)
    )
    assert timeline.peak_op == 3
    assert timeline.alive_at_peak == (
        AliveStorage(4, 350, "activation", "cat", "Global"),
        AliveStorage(2, 300, "activation", "gelu", "Net.b"),
        AliveStorage(3, 50, "activation", "gelu", "Net.b"),
        AliveStorage(0, 10, "parameter", "", "Global"),
    )
    assert timeline.peak_by_module == {"Global": 350, "Net.b": 350}


# Nothing, and much --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "before"), [("", 0), ("w : 100 held parameter\n x : 7", 107)])
def test_a_trace_without_ops(text: str, before: int) -> None:
    timeline = simulate(trace(text))
    assert timeline.live_bytes == ()
    assert (timeline.persistent_bytes, timeline.peak_bytes, timeline.peak_op) == (before, before, -1)
    assert sum(timeline.peak_by_category.values()) == before
    assert sum(alive.bytes for alive in timeline.alive_at_peak) == before
    assert timeline.peak_by_module == {}


def test_storages_without_bytes() -> None:
    timeline = simulate(
        trace("""
            x           : 0
            y = neg(x)  : 0 output
        """)
    )
    assert (timeline.live_bytes, timeline.peak_bytes, timeline.peak_op) == ((0,), 0, -1)


def test_bytes_beyond_32_bits() -> None:
    timeline = simulate(
        trace("""
            x           : 4000000000000000000
            y = neg(x)  : 4000000000000000000 output
        """)
    )
    assert timeline.peak_bytes == 8_000_000_000_000_000_000


def op(signature: int, creates: tuple[int, ...] = ()) -> Op:
    return Op(signature, "forward", -1, -1, False, -1, (), (), creates)


def signature(workspace_bytes: int = 0) -> Signature:
    return Signature("neg", (), (), "[[],{}]", False, False, False, None, workspace_bytes, "formula")


def storage(
    size: int, category: str, start: int, end: int | None, resizes: tuple[tuple[int, int], ...]
) -> Storage:
    return Storage(size, category, -1, start, end, (Interval("program", start, end),), resizes)


def plain_trace(signatures: list[Signature], ops: list[Op], storages: list[Storage]) -> Trace:
    """Make a trace without modules whose observed peak is yet to be filled in."""
    tables = (tuple(signatures), tuple(ops), tuple(storages))
    return Trace("made", "cpu", "2.13.0", *tables, (), (), (), (), (), 0)


def test_a_trace_with_a_hundred_thousand_ops() -> None:
    count = 100_000  # few storages are alive at once, each for three ops
    ops = [op(0, (number,)) for number in range(count)]
    storages = [
        replace(storage(8, "activation", number, min(number + 3, count), ()), producer=number)
        for number in range(count)
    ]
    long = replace(plain_trace([signature()], ops, storages), observed_peak_bytes=24)
    long.check()
    timeline = simulate(long)
    assert timeline.live_bytes == (8, 16) + (24,) * (count - 2)
    assert (timeline.peak_bytes, timeline.peak_op) == (24, 2)


# Against the loop ---------------------------------------------------------------------------------------

SIZES = st.integers(0, 50)


@st.composite
def random_storages(draw: st.DrawFn, ops: int) -> Storage:
    start = draw(st.integers(-1, ops))
    end = draw(st.none() | st.integers(max(start, 0), ops))
    last = ops if end is None else end
    times = draw(st.lists(st.integers(max(start, 0), last), max_size=3))
    resizes = tuple((time, draw(SIZES)) for time in sorted(times))
    return storage(draw(SIZES), draw(st.sampled_from(CATEGORIES)), start, end, resizes)


@st.composite
def random_traces(draw: st.DrawFn) -> Trace:
    signatures = [signature(draw(SIZES)) for _ in range(3)]
    ops = [op(number) for number in draw(st.lists(st.integers(0, 2), max_size=10))]
    storages = draw(st.lists(random_storages(len(ops)), max_size=8))
    made = plain_trace(signatures, ops, storages)
    return replace(made, observed_peak_bytes=max(count_live_bytes(made), default=made.persistent_bytes))


@settings(max_examples=150, deadline=None)
@given(random_traces())
def test_the_replay_agrees_with_counting_bytes(made: Trace) -> None:
    made.check()
    timeline = simulate(made)
    counted = count_live_bytes(made)
    assert timeline.live_bytes == counted
    assert timeline.by_category.sum(axis=0).tolist() == list(counted)
    assert timeline.by_category.min(initial=0) >= 0

    during = [made.persistent_bytes]
    during += [live + made.signatures[op.signature].workspace_bytes for live, op in zip(counted, made.ops)]
    assert timeline.peak_bytes == max(during)
    assert timeline.peak_op == during.index(max(during)) - 1
    assert sum(timeline.peak_by_category.values()) == timeline.peak_bytes


@settings(max_examples=150, deadline=None)
@given(random_traces())
def test_what_is_alive_at_the_peak_adds_up(made: Trace) -> None:
    timeline = simulate(made)
    sizes = [alive.bytes for alive in timeline.alive_at_peak]
    assert sizes == sorted(sizes, reverse=True)
    workspace = int(timeline.workspace_bytes[timeline.peak_op]) if timeline.peak_op >= 0 else 0
    assert sum(sizes) == timeline.peak_bytes - workspace
    found = by_category(temporary=workspace)
    for alive in timeline.alive_at_peak:
        found[alive.category] += alive.bytes
    assert found == timeline.peak_by_category
