"""Per-module statistics, trade-off curves and op policies, by hand and against trying everything."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.planning.modules.policy import optimal_policy
from trainfit.planning.modules.sac_stats import OpStats, SacStats, greedy_order, trade_off, units_of


def random_stats(seed: int, most: int = 9) -> SacStats:
    numbers = random.Random(seed)
    ops: list[OpStats] = []
    for number in range(numbers.randint(1, most)):
        view = numbers.random() < 0.15
        in_place = number > 0 and not view and numbers.random() < 0.2
        ops.append(
            OpStats(
                name=f"op{number}",
                seconds=0.0 if view else round(numbers.random(), 3),
                bytes=0 if view or in_place else numbers.randint(0, 20),
                view=view,
                random=not view and numbers.random() < 0.2,
                parent=numbers.randrange(number) if in_place else None,
                storable=numbers.random() < 0.9,
                repeatable=numbers.random() < 0.9,
            )
        )
    return SacStats(tuple(ops), store_random=numbers.random() < 0.2)


def policies(stats: SacStats) -> list[tuple[int, float]]:
    """Return stored bytes and seconds saved of every allowed policy."""
    units = units_of(stats)
    choices = [{"store": (True,), "recompute": (False,), "": (False, True)}[unit.always] for unit in units]
    return [
        (
            sum(unit.bytes for unit, stored in zip(units, states) if stored),
            sum(unit.seconds for unit, stored in zip(units, states) if stored),
        )
        for states in itertools.product(*choices)
    ]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 1))
def test_the_policy_saves_as_much_time_as_any(seed: int, share: float) -> None:
    stats = random_stats(seed)
    policy = optimal_policy(stats, share)
    saved = sum(op.seconds for op, stored in zip(stats.ops, policy) if stored)
    used = sum(op.bytes for op, stored in zip(stats.ops, policy) if stored)
    allowed = policies(stats)
    least = min(stored for stored, _ in allowed)
    capacity = max(share * stats.bytes, least)
    assert used <= capacity + 1e-6
    best = max(seconds for stored, seconds in allowed if stored <= capacity + 1e-9)
    assert saved == pytest.approx(best, abs=2e-4 * max(stats.seconds, 1e-9))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_ops_that_belong_together_share_a_fate(seed: int) -> None:
    stats = random_stats(seed)
    policy = optimal_policy(stats, random.Random(seed).random())
    assert len({policy[n] for n, op in enumerate(stats.ops) if op.random}) <= 1
    for unit in units_of(stats):
        assert len({policy[op] for op in unit.ops}) == 1
    for number, op in enumerate(stats.ops):
        if op.parent is not None:
            assert policy[number] == policy[op.parent]
        if not op.repeatable:
            assert policy[number] == 1


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_the_curve_is_convex_and_below_every_policy(seed: int) -> None:
    stats = random_stats(seed)
    if not stats.bytes or not stats.seconds:
        return
    curve = trade_off(stats)
    slopes = [line.slope for line in curve.lines]
    assert all(earlier <= later + 1e-9 for earlier, later in itertools.pairwise(slopes))
    for stored, saved in policies(stats):
        share = (stats.bytes - stored) / stats.bytes
        assert curve.least_share - 1e-9 <= share <= curve.most_share + 1e-9
        assert curve.seconds_share(share) * stats.seconds <= stats.seconds - saved + 1e-9


def test_a_module_by_hand() -> None:
    """A product, a cheap activation on it, a view: the activation goes first, the view always."""
    stats = SacStats(
        (
            OpStats("mm", 4.0, 100, saved_bytes=100),
            OpStats("gelu", 1.0, 100, saved_bytes=100),
            OpStats("view", 0.0, 0, view=True),
        )
    )
    assert [unit.ops for unit in greedy_order(stats)] == [(2,), (1,), (0,)]
    assert trade_off(stats).breakpoints == ((0.0, 0.0), (0.5, 0.2), (1.0, 1.0))
    assert [(s.slope, s.intercept) for s in trade_off(stats).lines] == [
        (pytest.approx(0.4), pytest.approx(0.0)),
        (pytest.approx(1.6), pytest.approx(-0.6)),
    ]
    assert optimal_policy(stats, 1.0) == [1, 1, 0]
    assert optimal_policy(stats, 0.5) == [1, 0, 0]
    assert optimal_policy(stats, 0.49) == [0, 0, 0]
    assert optimal_policy(stats, 0.0) == [0, 0, 0]


def test_what_has_effects_outside_is_stored_whatever_the_share() -> None:
    stats = SacStats((OpStats("batch_norm", 1.0, 80, repeatable=False), OpStats("relu", 1.0, 20)))
    assert optimal_policy(stats, 0.0) == [1, 0]
    assert trade_off(stats).most_share == pytest.approx(0.2)


def test_random_ops_are_stored_together_or_not_at_all() -> None:
    ops = (
        OpStats("dropout", 2.0, 10, random=True),
        OpStats("mm", 1.0, 10),
        OpStats("dropout", 2.0, 10, random=True),
    )
    assert optimal_policy(SacStats(ops), 0.5) == [0, 1, 0]
    assert optimal_policy(SacStats(ops), 0.7) == [1, 0, 1]
    assert optimal_policy(SacStats(ops, store_random=True), 0.0) == [1, 0, 1]


def test_in_place_ops_go_with_what_they_overwrite() -> None:
    stats = SacStats((OpStats("mm", 1.0, 10), OpStats("relu_", 3.0, 0, parent=0), OpStats("mm", 2.0, 10)))
    assert optimal_policy(stats, 0.5) == [1, 1, 0]


def test_a_share_outside_of_its_range_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        optimal_policy(SacStats((OpStats("mm", 1.0, 1),)), 1.5)
