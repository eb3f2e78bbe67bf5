"""Allocations and frees in order: written down by hand, and replayed against the timeline."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from test_simulate import random_traces
from trace_text import trace

from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Event, Trace

STEP = trace("""
    w           : 100 held parameter
    x           : 400
    a = mm(x, w): 300 workspace 50
    b = neg(a)  : 200
    c = neg(b)  : 250
    y = sum(c)  :   4 output
""")
W, X, A, B, C, Y = range(6)


def test_every_allocation_and_free_in_its_place() -> None:
    assert STEP.events == (
        Event(-1, W, 100),
        Event(-1, X, 400),
        Event(0, A, 300),
        Event(0, -1, 50),  # the kernel's workspace, while it runs
        Event(0, -1, -50),
        Event(1, X, -400),  # x is freed before the next op allocates
        Event(1, B, 200),
        Event(2, A, -300),
        Event(2, C, 250),
        Event(3, B, -200),
        Event(3, Y, 4),
        Event(4, C, -250),
    )


def test_what_is_freed_at_one_time_is_freed_in_the_order_that_was_seen() -> None:
    both = trace("""
        x           : 400
        a = mm(x)   : 300
        y = dot(a, x): 4 output
        z = neg(y)  :   4 output
    """)
    for releases in ((0, 1), (1, 0)):
        events = replace(both, releases=releases).events
        freed = [event.storage for event in events if event.bytes < 0]
        assert freed == list(releases)


def test_a_storage_that_grows_is_there_twice_for_a_moment() -> None:
    resized = trace("""
        x           : 400 held
        a = neg(x)  : 100
        a -> 300
        b = neg(a)  : 8 output
        a -> 0
        c = neg(b)  : 8 output
    """)
    changes = [event for event in resized.events if event.storage == 1]
    assert changes == [Event(0, 1, 100), Event(1, 1, 300), Event(1, 1, -100), Event(2, 1, -300)]


def replayed(made: Trace) -> list[int]:
    """Return the bytes in use at the end of each op, and check that each free gives back what was taken."""
    taken: dict[int, int] = {}
    used = dict.fromkeys(range(len(made.ops)), 0)
    last = -1
    total = 0
    for event in made.events:
        assert event.time >= last, "events are in order"
        for op in range(max(last, 0), min(event.time, len(made.ops))):
            used[op] = total
        last = event.time
        if event.storage >= 0:
            taken[event.storage] = taken.get(event.storage, 0) + event.bytes
            assert taken[event.storage] >= 0, "nothing is freed that is not there"
        total += event.bytes
    for op in range(max(last, 0), len(made.ops)):
        used[op] = total
    return list(used.values())


@settings(max_examples=150, deadline=None)
@given(random_traces())
def test_replaying_the_events_gives_the_timeline(made: Trace) -> None:
    assert tuple(replayed(made)) == simulate(made).live_bytes
