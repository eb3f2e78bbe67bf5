"""Bytes at any moment: by hand, and against the replay of the same random traces."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from test_simulate import random_traces
from trace_text import trace

from trainfit.memory.history import history_of
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Interval, Trace

STEP = """
    w              :  10 held parameter
    a = mul(w)     : 100 saved
    y = sum(a)     :   1
    -- backward
    e = ones(y)    :   1
    g = back(e, a) :  10 gradient output
    h = neg(g)     :  10
"""


def sizes(found: dict[str, int]) -> dict[str, int]:
    return {category: size for category, size in found.items() if size}


def test_between_ops_what_is_released_before_the_next_one_is_gone() -> None:
    history = history_of(trace(STEP))
    assert sizes(history.at(0)) == {"parameter": 10}
    assert sizes(history.at(1)) == {"parameter": 10, "activation": 100}
    assert sizes(history.at_op(3)) == {"parameter": 10, "activation": 100, "temporary": 1, "gradient": 10}
    # After the op that made the gradient, what it read is gone.
    assert sizes(history.at(4)) == {"parameter": 10, "gradient": 10}
    assert history.largest(0, 5) == 3
    assert history.largest(2, 2) is None


def test_a_moment_may_be_before_some_of_the_releases() -> None:
    step = trace(STEP)
    order = [number for number, storage in enumerate(step.storages) if storage.end == 4]
    before = [n for n, storage in enumerate(step.storages) if storage.end is not None and storage.end < 4]
    step = replace(step, releases=(*before, *order))
    history = history_of(step)
    assert history.releases_before(4) == len(before) + len(order)
    freed = step.storages[order[0]].bytes
    everything = sum(history.at(4).values()) + sum(step.storages[number].bytes for number in order)
    assert sum(history.at(4, len(before)).values()) == everything
    assert sum(history.at(4, len(before) + 1).values()) == everything - freed


def test_a_gradient_is_temporary_until_it_is_one() -> None:
    step = trace(STEP)
    (number,) = [n for n, storage in enumerate(step.storages) if storage.category == "gradient"]
    gradient = step.storages[number]
    holders = (Interval("program", gradient.start, None), Interval("gradient", gradient.start + 1, None))
    storages = list(step.storages)
    storages[number] = replace(gradient, holders=holders)
    history = history_of(replace(step, storages=tuple(storages)))
    assert sizes(history.at_op(3)) == {"parameter": 10, "activation": 100, "temporary": 11}
    assert sizes(history.at(4)) == {"parameter": 10, "gradient": 10}


@settings(max_examples=150, deadline=None)
@given(random_traces())
def test_while_ops_run_it_is_the_replay(made: Trace) -> None:
    history = history_of(made)
    timeline = simulate(made)
    assert history.totals.tolist() == list(timeline.live_bytes)
    for op in range(len(made.ops)):
        before = sum(history.at(op).values())
        created = sum(made.occupied_bytes[storage] for storage in made.ops[op].creates)
        assert before + created == timeline.live_bytes[op]
