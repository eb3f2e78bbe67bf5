"""Whose the bytes at the peak are, against a step small enough to count by hand."""

from __future__ import annotations

from trace_text import trace

from trainfit.memory.peak_owners import OUTSIDE, peak_owners
from trainfit.traces.simulate import simulate


def test_owners_are_counted_by_hand() -> None:
    """The weight is Net's, the state of the optimizer nobody's; b is made in Net.one, as is the workspace."""
    timeline = simulate(
        trace("""
        w              : 100 held parameter @Net
        s              : 200 held optimizer_state
        x              :  10 held
        a = one(x, w)  :  40 saved @Net.one
        b = two(a)     : 300 workspace 7 @Net.one
        y = sum(b)     :   4 output @Net
        -- backward
        g = back(a)    : 100 for a @Net.one
        """)
    )
    names = [module.name for module in timeline.trace.modules]
    found = {
        (names[n] if n != OUTSIDE else "", kind): size for (n, kind), size in peak_owners(timeline).items()
    }
    assert sum(found.values()) == timeline.peak_bytes == 100 + 200 + 10 + 40 + 300 + 7
    assert found["Net", "parameter"] == 100 and found["", "optimizer_state"] == 200
    assert found["Net.one", "activation"] + found.get(("Net.one", "temporary"), 0) == 40 + 300 + 7


def test_gradients_belong_to_whose_backward_makes_them() -> None:
    """One that is there before the step too: it belongs to the module whose backward adds to it."""
    timeline = simulate(
        trace("""
        w              : 100 held parameter @Net
        g              : 100 held gradient
        x              :  10 held
        a = one(x, w)  : 400 saved @Net.one
        -- backward
        d = back(a)    : 100 for a @Net.one
        g += add(d)    : for a @Net.one
        """)
    )
    names = [module.name for module in timeline.trace.modules]
    found = {(names[n], kind): size for (n, kind), size in peak_owners(timeline).items() if n != OUTSIDE}
    assert found["Net.one", "gradient"] == 100
    assert sum(peak_owners(timeline).values()) == timeline.peak_bytes
