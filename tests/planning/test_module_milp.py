"""The program over modules, against trying every set of units and by hand."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.planning.modules.milp import ModuleProblem, ModuleUnit, Stretch
from trainfit.planning.modules.sac_stats import OpStats, SacStats, trade_off

MIB = 1 << 20


def unit(
    *ops: tuple[float, int, bool], away: tuple[int, int], around: tuple[int, ...] = (), held: int = 0
) -> ModuleUnit:
    """Make a unit of ops given as (seconds, MiB, saved by autograd)."""
    stats = SacStats(
        tuple(
            OpStats("op", seconds, size * MIB, saved_bytes=size * MIB * saved) for seconds, size, saved in ops
        )
    )
    return ModuleUnit(around, *away, trade_off(stats), held * MIB)


def solved(problem: ModuleProblem, budget_mib: float) -> tuple[dict[int, float], float] | None:
    found = problem.solve(round(budget_mib * MIB), seconds_limit=10.0, gap_seconds=0.0)
    assert found.proven
    assert found.bound_seconds <= found.seconds + 1e-9
    return (found.shares, found.seconds) if found.feasible else None


def test_two_layers_by_hand() -> None:
    """At the peak both are away. Cheap bytes go first: all of the first layer before any of the second."""
    cheap = unit((1.0, 100, True), away=(10, 90))
    dear = unit((5.0, 100, True), away=(20, 80))
    problem = ModuleProblem([cheap, dear], [Stretch(50, 40 * MIB, 260 * MIB)])
    assert solved(problem, 300) == ({}, 0.0)
    shares, seconds = solved(problem, 250) or ({}, -1.0)
    assert shares == {0: pytest.approx(0.5)} and seconds == pytest.approx(0.5)
    shares, seconds = solved(problem, 150) or ({}, -1.0)
    assert shares == {0: pytest.approx(1.0), 1: pytest.approx(0.5)} and seconds == pytest.approx(3.5)
    assert solved(problem, 99) is None


def test_a_unit_frees_nothing_before_its_forward_is_done_or_after_its_backward_has_begun() -> None:
    layer = unit((1.0, 100, True), away=(10, 90))
    for op, possible in ((9, False), (10, True), (89, True), (90, False)):
        assert (solved(ModuleProblem([layer], [Stretch(op, 0, 100 * MIB)]), 50) is not None) == possible


def test_only_what_autograd_would_have_kept_is_freed() -> None:
    """Half of the bytes are not saved by autograd: the first half of what is discarded frees nothing."""
    layer = unit((1.0, 100, True), (1.0, 100, False), away=(0, 10))
    shares, seconds = solved(ModuleProblem([layer], [Stretch(5, 0, 100 * MIB)]), 50) or ({}, -1.0)
    assert shares == {0: pytest.approx(0.75)} and seconds == pytest.approx(1.5)


def test_inputs_that_are_held_count_against_a_unit() -> None:
    layer = unit((1.0, 100, True), away=(0, 10), held=30)
    problem = ModuleProblem([layer], [Stretch(5, 0, 100 * MIB)])
    assert solved(problem, 29) is None
    shares, _ = solved(problem, 30) or ({}, -1.0)
    assert shares == {0: pytest.approx(1.0)}


def test_units_are_never_nested() -> None:
    outer = unit((4.0, 100, True), away=(10, 90))
    inner = unit((1.0, 50, True), away=(8, 92), around=(0,))
    problem = ModuleProblem([outer, inner], [Stretch(50, 0, 100 * MIB)])
    assert set((solved(problem, 50) or ({}, 0.0))[0]) == {1}
    assert set((solved(problem, 20) or ({}, 0.0))[0]) == {0}


def test_states_are_divided_by_the_world_size() -> None:
    layer = unit((1.0, 10, True), away=(0, 10))
    stretches = [Stretch(5, 80 * MIB, 20 * MIB)]
    assert solved(ModuleProblem([layer], stretches), 95) is not None
    assert solved(ModuleProblem([layer], stretches), 85) is None
    assert solved(ModuleProblem([layer], stretches, processes=4), 40) == ({}, 0.0)
    assert solved(ModuleProblem([layer], stretches, processes=4), 29) is None


def test_the_smallest_peak_discards_everything() -> None:
    layers = [unit((1.0, 100, True), away=(n, 100 - n)) for n in range(3)]
    found = ModuleProblem(layers, [Stretch(50, 0, 300 * MIB)]).smallest_peak(seconds_limit=10.0)
    assert found.shares == {n: pytest.approx(1.0, abs=0.01) for n in range(3)}


def random_problem(seed: int) -> ModuleProblem:
    """Make two blocks, one after the other, each with parts inside."""
    numbers = random.Random(seed)
    units: list[ModuleUnit] = []
    for block in range(2):
        first, last = 10 * block + 5, 90 - 10 * block

        def one(away: tuple[int, int], around: tuple[int, ...]) -> ModuleUnit:
            ops = [
                (round(numbers.uniform(0.1, 3), 2), numbers.randint(1, 40), numbers.random() < 0.7)
                for _ in range(numbers.randint(1, 4))
            ]
            return unit(*ops, away=away, around=around, held=numbers.choice((0, 0, 3)))

        outer = len(units)
        units.append(one((first, last), ()))
        units += [one((first - 1, last + 1), (outer,)) for _ in range(numbers.randint(0, 2))]
    stretches = [
        Stretch(n, 10 * numbers.randint(0, 5) * MIB, numbers.randint(60, 160) * MIB) for n in (8, 30, 50)
    ]
    return ModuleProblem(units, stretches, processes=numbers.choice((1, 2)))


def tried(problem: ModuleProblem, budget_mib: float) -> float:
    """Return the least seconds of every set of units with every combination of shares on a grid."""
    best = float("inf")
    for chosen in itertools.product((False, True), repeat=len(problem.units)):
        inside = [n for n, is_unit in enumerate(chosen) if is_unit]
        if any(outer in inside for n in inside for outer in problem.units[n].around):
            continue
        best = min(best, _grid(problem, inside, budget_mib * MIB))
    return best


STEPS = 12


def _grid(problem: ModuleProblem, inside: list[int], budget: float) -> float:
    best = float("inf")
    curves = [problem.units[n].curve for n in inside]
    for steps in itertools.product(range(STEPS + 1), repeat=len(inside)):
        shares = [c.least_share + (c.most_share - c.least_share) * s / STEPS for c, s in zip(curves, steps)]
        freed = {
            n: c.bytes * share - (c.bytes - c.saved_bytes) - problem.units[n].held_bytes
            for n, c, share in zip(inside, curves, shares)
        }
        if min(freed.values(), default=0) < 0:
            continue
        fits = all(
            problem.peak_bytes(stretch)
            - sum(
                size
                for n, size in freed.items()
                if problem.units[n].away_from <= stretch.op < problem.units[n].away_until
            )
            <= budget + 1
            for stretch in problem.stretches
        )
        if fits:
            best = min(best, sum(c.seconds * c.seconds_share(share) for c, share in zip(curves, shares)))
    return best


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.4, 1.0))
def test_no_set_of_units_on_a_grid_of_shares_is_better(seed: int, tightness: float) -> None:
    problem = random_problem(seed)
    budget = tightness * max(map(problem.peak_bytes, problem.stretches)) / MIB
    found, best = solved(problem, budget), tried(problem, budget)
    if found is None:
        assert best == float("inf")
    else:
        assert found[1] <= best + 1e-6


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_more_memory_never_costs_time(seed: int) -> None:
    problem = random_problem(seed)
    peak = max(map(problem.peak_bytes, problem.stretches)) / MIB
    before = float("inf")
    for part in range(4, 11):
        found = solved(problem, peak * part / 10)
        assert found is not None or before == float("inf")
        if found is not None:
            assert found[1] <= before + 1e-6
            before = found[1]
    assert before == pytest.approx(0.0)
