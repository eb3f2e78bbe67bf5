"""What runs at once: links that two collectives share, and computing beside a collective, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.costs.contention import computing_delays, link_delays


def delays(*collectives: tuple[float, float, int, float]) -> list[float]:
    """Return the delays of collectives that are given as begin, seconds, queue and share of the link."""
    begin, seconds, queues, use = (np.array(column) for column in zip(*collectives))
    return link_delays(begin, seconds, queues.astype(np.int64), use).tolist()


def test_two_that_want_the_whole_link_each_take_as_much_longer_as_they_overlap() -> None:
    # Together from 0: each has half of the link until the shorter one is done, at 8; the other needs 6 more.
    assert delays((0.0, 4.0, 0, 1.0), (0.0, 10.0, 1, 1.0)) == [4.0, 4.0]
    # The second begins when half of the first is done: 5 s of each are shared.
    assert delays((0.0, 10.0, 0, 1.0), (5.0, 10.0, 1, 1.0)) == [5.0, 5.0]


def test_what_leaves_room_on_the_link_delays_nobody() -> None:
    assert delays((0.0, 10.0, 0, 0.5), (0.0, 10.0, 1, 0.5)) == [0.0, 0.0]
    # Six tenths each are a fifth too much: 10 s of both take 12.
    assert delays((0.0, 10.0, 0, 0.6), (0.0, 10.0, 1, 0.6)) == [pytest.approx(2.0)] * 2


def test_collectives_of_one_group_take_turns_and_apart_nobody_waits() -> None:
    assert delays((0.0, 10.0, 0, 1.0), (10.0, 10.0, 0, 1.0)) == [0.0, 0.0]
    assert delays((0.0, 10.0, 0, 1.0), (20.0, 10.0, 1, 1.0)) == [0.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.floats(0, 9), st.integers(0, 2), st.floats(0, 1)),
        min_size=2,
        max_size=12,
    )
)
def test_delays_are_those_of_every_pair(collectives: list[tuple[float, float, int, float]]) -> None:
    expected = [0.0] * len(collectives)
    for one, (begin, seconds, queue, use) in enumerate(collectives):
        for other, (begin_2, seconds_2, queue_2, use_2) in enumerate(collectives):
            if one != other and queue != queue_2:
                overlap = min(begin + seconds, begin_2 + seconds_2) - max(begin, begin_2)
                expected[one] += max(overlap, 0.0) * min(max(use + use_2 - 1.0, 0.0), 1.0)
    assert delays(*collectives) == pytest.approx(expected)


def test_computing_is_slower_while_a_collective_has_its_part_of_the_device() -> None:
    begin = np.array([0.0, 2.0, 10.0, 4.0])
    seconds = np.array([10.0, 4.0, 5.0, 4.0])
    exchanges = np.array([False, True, False, True])
    # From 2 to 8 one of the two collectives runs: 6 s of the first kernel get 4 / 5 of the device.
    found = computing_delays(begin, seconds, exchanges, ~exchanges, 0.2)
    assert found.tolist() == [pytest.approx(6 * 0.25), 0.0, 0.0, 0.0]


def test_without_communication_nothing_is_delayed() -> None:
    nothing = np.zeros(2, dtype=bool)
    assert not computing_delays(np.zeros(2), np.ones(2), nothing, ~nothing, 0.2).any()
