"""The cheapest choice and the trade-off curve, against trying everything."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.planning.curves import curve_of
from trainfit.planning.minimum_cut import Choice, cheapest
from trainfit.planning.regions import Group

NEITHER, KEPT, REPEATED = range(3)


def random_groups(seed: int, most: int = 7) -> list[Group]:
    numbers = random.Random(seed)
    return [
        Group(
            ops=(n,),
            inputs=frozenset(read for read in range(n) if numbers.random() < 0.4),
            storages=(n,),
            bytes=numbers.randint(0, 10),
            seconds=round(numbers.random(), 3),
            needed=numbers.random() < 0.5,
            keepable=numbers.random() < 0.85,
            repeatable=numbers.random() < 0.85,
        )
        for n in range(numbers.randint(1, most))
    ]


def all_choices(groups: list[Group]) -> list[tuple[int, float]]:
    """Return bytes and seconds of every allowed way to have all needed values."""
    found = []
    for states in itertools.product((NEITHER, KEPT, REPEATED), repeat=len(groups)):
        if all(_allowed(group, states[n], states) for n, group in enumerate(groups)):
            kept = sum(group.bytes for group, state in zip(groups, states) if state == KEPT)
            seconds = sum(group.seconds for group, state in zip(groups, states) if state == REPEATED)
            found.append((kept, seconds))
    return found


def _allowed(group: Group, state: int, states: tuple[int, ...]) -> bool:
    if state == NEITHER:
        return not group.needed
    if state == KEPT:
        return group.keepable
    return group.repeatable and all(states[read] != NEITHER for read in group.inputs)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.001, 0.5))
def test_the_cheapest_choice_is_the_cheapest_of_all(seed: int, price: float) -> None:
    groups = random_groups(seed)
    found, expected = cheapest(groups, price), all_choices(groups)
    if not expected:
        assert found is None
        return
    assert found is not None
    best = min(kept * price + seconds for kept, seconds in expected)
    assert found.bytes * price + found.seconds == pytest.approx(best)
    assert_valid(groups, found)


def assert_valid(groups: list[Group], choice: Choice) -> None:
    for number, group in enumerate(groups):
        if group.needed:
            assert number in choice.kept | choice.repeated
        if number in choice.repeated:
            assert group.repeatable
            assert group.inputs <= choice.kept | choice.repeated
        if number in choice.kept:
            assert group.keepable


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_curve_is_the_lower_hull_of_all_choices(seed: int) -> None:
    """No choice lies below the curve, and the curve's ends are the least bytes and the least seconds."""
    groups = random_groups(seed, most=6)
    curve, expected = curve_of(groups), all_choices(groups)
    if not expected:
        assert curve == []
        return
    for point in curve:
        assert_valid(groups, point)
    assert curve[0].bytes == min(kept for kept, _ in expected)
    assert curve[-1].seconds == pytest.approx(min(seconds for _, seconds in expected))
    for price in (0.0, 0.01, 0.05, 0.1, 0.5, 2.0):
        on_curve = min(point.seconds + price * point.bytes for point in curve)
        assert on_curve == pytest.approx(min(seconds + price * kept for kept, seconds in expected), abs=1e-9)


def test_a_chain_by_hand() -> None:
    """x -> a (fast, large) -> b (slow, small): keep b and make a again, or keep both, or make both again."""
    a = Group((0,), frozenset(), (0,), 100, 1.0, needed=True, keepable=True, repeatable=True)
    b = Group((1,), frozenset({0}), (1,), 10, 5.0, needed=True, keepable=True, repeatable=True)
    points = [(point.bytes, point.seconds) for point in curve_of([a, b])]
    assert points == [(0, 6.0), (10, 1.0), (110, 0.0)]


def test_what_cannot_be_had_is_refused() -> None:
    lost = Group((0,), frozenset(), (0,), 1, 1.0, needed=True, keepable=False, repeatable=False)
    assert cheapest([lost], 1.0) is None
    assert curve_of([lost]) == []
