"""The cheapest choice and the trade-off curve, against trying everything."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.planning.curves import curve_of, fastest_within, with_points_between
from trainfit.planning.groups import Group
from trainfit.planning.minimum_cut import Choice, cheapest


def random_groups(seed: int, most: int = 7) -> list[Group]:
    numbers = random.Random(seed)
    groups: list[Group] = []
    for number in range(numbers.randint(1, most)):
        values = numbers.randint(1, 2)
        before = [(n, place) for n, group in enumerate(groups) for place in range(len(group.sizes))]
        groups.append(
            Group(
                ops=(number,),
                reads=frozenset(value for value in before if numbers.random() < 0.3),
                storages=tuple(range(2 * number, 2 * number + values)),
                sizes=tuple(numbers.randint(0, 10) for _ in range(values)),
                seconds=round(numbers.random(), 3),
                saved=tuple(numbers.random() < 0.35 for _ in range(values)),
                keepable=numbers.random() < 0.85,
                repeatable=numbers.random() < 0.85,
            )
        )
    return groups


def all_choices(groups: list[Group]) -> list[tuple[int, float]]:
    """Return bytes and seconds of every allowed way to have all needed values.

    For each value: is it kept? For each group: is it recomputed?
    """
    values = [(n, place) for n, group in enumerate(groups) for place in range(len(group.sizes))]
    found = []
    for again in itertools.product((False, True), repeat=len(groups)):
        if any(repeated and not group.repeatable for repeated, group in zip(again, groups)):
            continue
        needed = {value for value in values if groups[value[0]].saved[value[1]]}
        for repeated, group in zip(again, groups):
            needed |= group.reads if repeated else set()
        kept = [value for value in needed if not again[value[0]]]
        if all(groups[n].keepable for n, _ in kept):
            size = sum(groups[n].sizes[place] for n, place in kept)
            found.append((size, sum(g.seconds for g, repeated in zip(groups, again) if repeated)))
    return found


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
    a = Group((0,), frozenset(), (0,), (100,), 1.0, (True,), keepable=True, repeatable=True)
    b = Group((1,), frozenset({(0, 0)}), (1,), (10,), 5.0, (True,), keepable=True, repeatable=True)
    points = [(point.bytes, point.seconds) for point in curve_of([a, b])]
    assert points == [(0, 6.0), (10, 1.0), (110, 0.0)]


def test_only_the_needed_result_of_an_op_is_kept() -> None:
    """Dropout returns a result and a mask; backward needs the mask, which costs what the mask weighs."""
    dropout = Group((0,), frozenset(), (0, 1), (400, 100), 1.0, (False, True), keepable=True, repeatable=True)
    points = [(point.bytes, point.seconds) for point in curve_of([dropout])]
    assert points == [(0, 1.0), (100, 0.0)]


def test_what_cannot_be_had_is_refused() -> None:
    lost = Group((0,), frozenset(), (0,), (1,), 1.0, (True,), keepable=False, repeatable=False)
    assert cheapest([lost], 1.0) is None
    assert curve_of([lost]) == []


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 1))
def test_within_a_limit_no_choice_is_faster(seed: int, share: float) -> None:
    groups = random_groups(seed, most=6)
    limit = round(share * sum(group.bytes for group in groups))
    found = fastest_within(groups, limit)
    expected = [seconds for kept, seconds in all_choices(groups) if kept <= limit]
    if not expected:
        assert found is None
        return
    assert found is not None
    assert found.bytes <= limit
    assert found.seconds == pytest.approx(min(expected), abs=2e-4 * sum(group.seconds for group in groups))
    assert_valid(groups, found)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_points_between_are_no_worse_than_the_hull_and_keep_its_ends(seed: int) -> None:
    groups = random_groups(seed, most=6)
    hull = curve_of(groups)
    points = with_points_between(groups, hull, 8)
    assert points[:1] == hull[:1] and points[-1:] == hull[-1:]
    for earlier, later in itertools.pairwise(points):
        assert earlier.bytes < later.bytes and earlier.seconds > later.seconds
