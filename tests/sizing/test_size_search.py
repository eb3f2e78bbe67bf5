"""The search for the largest size, beside trying every size; and how few questions it asks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from trainfit.errors import OptionError
from trainfit.sizing.size_lists import read_names, read_sizes
from trainfit.sizing.size_search import Bracket, Needed, confirmed, larger, largest_fitting, rounder

BUDGET = 10_000.0


class Asked:
    """A function from size to bytes, and the sizes that it was asked for."""

    def __init__(self, bytes_of: Callable[[int], float]) -> None:
        self.bytes_of = bytes_of
        self.sizes: list[int] = []

    def __call__(self, size: int) -> Needed:
        self.sizes.append(size)
        needed = self.bytes_of(size)
        return Needed(needed <= BUDGET, needed)


GROWTHS: dict[str, Callable[[int], float]] = {
    "line": lambda size: 700 + 13 * size,
    "exact": lambda size: 100 * size,
    "parabola": lambda size: 5 + 3 * size + 0.4 * size**2,
    "steps": lambda size: 512 * math.ceil((100 + 7 * size) / 512),
    "cubic": lambda size: size**3 / 50,
    "jump": lambda size: 10 * size if size < 137 else 1e9,
    "nothing known": lambda size: math.nan if size < 321 else math.inf,
    "slow": lambda size: 3000 * math.log(size + 1),
}


@pytest.mark.parametrize("name", GROWTHS)
def test_the_largest_that_fits_is_found_as_if_all_were_tried(name: str) -> None:
    growth = GROWTHS[name]

    def needed(size: int) -> Needed:
        if name == "nothing known":
            return Needed(size < 321)
        return Needed(growth(size) <= BUDGET, growth(size))

    every = [size for size in range(1, 2000) if needed(size).fits]
    asked = Asked(growth)

    def ask(size: int) -> Needed:
        asked.sizes.append(size)
        return needed(size)

    found = largest_fitting(ask, int(BUDGET), Bracket(1, 1_000_000))
    assert found == max(every)
    assert len(asked.sizes) < 45
    assert found + 1 in asked.sizes


def test_a_line_takes_four_questions() -> None:
    asked = Asked(GROWTHS["line"])
    assert largest_fitting(asked, int(BUDGET), Bracket(1, 10**6), {2: asked(2), 4: asked(4)}) == 715
    assert asked.sizes == [2, 4, 715, 716]  # (10000 - 700) / 13 = 715.4


def test_nothing_and_everything() -> None:
    assert largest_fitting(Asked(lambda size: 1e9), int(BUDGET), Bracket(1, 100)) == 0
    assert largest_fitting(Asked(lambda size: 1.0), int(BUDGET), Bracket(1, 100)) == 100
    assert confirmed(Asked(lambda size: 1e9), Asked(lambda size: 1e9), int(BUDGET), Bracket(1, 9)) is None
    assert largest_fitting(lambda size: None, int(BUDGET), Bracket(1, 100)) is None


def test_what_is_worked_out_is_confirmed_with_two_questions() -> None:
    truth, guess = Asked(GROWTHS["parabola"]), Asked(GROWTHS["parabola"])
    assert confirmed(truth, guess, int(BUDGET), Bracket(1, 10**6)) == 154
    assert sorted(truth.sizes) == [154, 155]


@pytest.mark.parametrize("seed", range(40))
def test_the_truth_counts_where_guesses_are_wrong(seed: int) -> None:
    chance = random.Random(seed)
    slope, offset = chance.uniform(1, 900), chance.uniform(0, 9000)
    wrong = chance.choice((0.5, 0.9, 0.99, 1.01, 1.1, 2.0))
    truth = Asked(lambda size: offset + slope * size)
    found = confirmed(
        truth, Asked(lambda size: wrong * offset + slope * size), int(BUDGET), Bracket(1, 10**6)
    )
    expected = math.floor((BUDGET - offset) / slope)
    assert (found or 0) == expected
    assert len(truth.sizes) <= 40


def test_a_size_that_is_refused_ends_the_line() -> None:
    asked: list[int] = []

    def ask(size: int) -> Needed:
        asked.append(size)
        return Needed(True, 10.0 * size) if size <= 50 else Needed(False)

    assert confirmed(ask, Asked(lambda size: 0.1 * size), int(BUDGET), Bracket(1, 10**6)) == 50
    assert len(asked) < 16


def test_without_guesses_only_the_truth_is_asked() -> None:
    truth = Asked(GROWTHS["steps"])
    assert confirmed(truth, lambda size: None, int(BUDGET), Bracket(1, 10**6)) == 1375
    assert len(truth.sizes) < 30


def test_a_larger_size_that_fits_by_luck_is_found() -> None:
    # The peak alone allows 100; the allocator takes a fifth more, but not at 91.
    def needed(size: int) -> Needed:
        bytes_needed = 100 * size * (1.0 if size == 91 else 1.2)
        return Needed(bytes_needed <= BUDGET, bytes_needed)

    def peak(size: int) -> Needed:
        return Needed(100 * size <= BUDGET, 100 * size)

    assert largest_fitting(needed, int(BUDGET), Bracket(1, 1000)) == 83
    assert larger(needed, peak, int(BUDGET), 83, 1000) == 91
    assert confirmed(needed, needed, int(BUDGET), Bracket(1, 1000), peak=peak) == 91


def test_a_rounder_size_that_fits_by_luck_is_found() -> None:
    def needed(size: int) -> Needed:
        bytes_needed = 100 * size * (1.0 if size % 32 == 0 else 1.2)
        return Needed(bytes_needed <= BUDGET, bytes_needed)

    assert rounder(needed, 83, 1000) == 96  # the next multiple of 32, and not beyond 83 + 83 / 4
    assert rounder(needed, 83, 95) == 83
    assert rounder(lambda size: None, 83, 1000) == 83
    assert confirmed(needed, needed, int(BUDGET), Bracket(1, 1000)) == 96


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("8", (8,)), ("1,2, 4,8", (1, 2, 4, 8)), ("max", ("max",)), ("2,MAX,2", (2, "max")), ("-1", (-1,))],
)
def test_lists_of_sizes(text: str, sizes: tuple[int | str, ...]) -> None:
    assert read_sizes(text, "--batch") == sizes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "x",
            "--batch must be a whole number, several with commas between them as in 1,2,4,8, or max; got 'x'",
        ),
        ("1,,2", "--batch '1,,2' has a comma with nothing beside it"),
        ("", "got ''"),
        (",".join(map(str, range(101))), "--batch takes 100 values at most, got 101"),
        ("9" * 5000, "must be a whole number"),
    ],
)
def test_what_is_no_list_of_sizes(text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said.replace("(", r"\(")):
        read_sizes(text, "--batch")


def test_a_file_with_a_comma_is_one_device(tmp_path: object) -> None:
    assert read_names("h100,t4,h100", "--device") == ("h100", "t4")
    assert read_names("h100", "--device") == ("h100",)
    with pytest.raises(OptionError, match="comma with nothing beside it"):
        read_names("h100,", "--device")
    from pathlib import Path

    file = Path(str(tmp_path)) / "a,b.json"
    file.write_text("{}")
    assert read_names(str(file), "--device") == (str(file),)
