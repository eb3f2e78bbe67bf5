"""What certificates set aside where memory depends on data."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from trainfit.planning.certify import peak_within, reserve_bytes
from trainfit.traces.assumptions import Assumption
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Storage, Trace

PARAMETER = Storage(1000, "parameter", -1, -1, None, ())
STEP = Trace("t", "cpu", "2", (), (), (PARAMETER,), (), (), (), (), (), 0)
ROUTED = replace(STEP, assumptions=(Assumption("data", "a router sends tokens evenly"),))


def test_nothing_is_set_aside_where_memory_is_known() -> None:
    assert peak_within(STEP, 5000) == 5000
    assert reserve_bytes(STEP, replace(simulate(STEP), peak_bytes=5000)) == 0


@given(st.integers(1000, 10**7), st.integers(1000, 10**7))
def test_a_peak_within_is_one_that_fits_with_its_reserve(peak: int, budget: int) -> None:
    """The largest, but for the byte that rounding up may take."""
    timeline = replace(simulate(ROUTED), peak_bytes=peak)
    fits = peak + reserve_bytes(ROUTED, timeline) <= budget
    largest = peak_within(ROUTED, budget)
    assert fits == (peak <= largest) or abs(peak - largest) <= 1
