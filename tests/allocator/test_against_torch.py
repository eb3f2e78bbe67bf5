"""The simulation beside torch's real allocator: recorded answers, and fresh ones where the oracle is there.

The environment variable TRAINFIT_ALLOCATOR_ORACLE names the oracle; see `benchmarks/allocator_cases.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import recorded_answers  # noqa: E402

sys.path.remove(str(HERE))
cases = sys.modules["allocator_cases"]

RECORDED = list(recorded_answers.recorded())
SEQUENCES = 2000
ORACLES = cases.oracles()


@pytest.mark.parametrize(
    ("found", "version", "answer"),
    [
        pytest.param(*entry, id=f"{number}-{entry[0].option}-{entry[1]}")
        for number, entry in enumerate(RECORDED)
    ],
)
def test_recorded_answers(found: Any, version: str, answer: dict[str, Any]) -> None:
    assert recorded_answers.compact(cases.our_answer(version, found.case)) == answer


def test_the_recorded_answers_are_worth_something() -> None:
    """Every option and version is there, and cases that run out of memory, release, and differ by version."""
    pairs = {(found.option, version) for found, version, _ in RECORDED}
    assert pairs == {
        (option, version)
        for option in cases.OPTIONS
        for version in recorded_answers.VERSIONS
        if cases.exists_in(option, version)
    }
    assert {answer["status"] for _, _, answer in RECORDED} == {0, 3}
    different = {found.option for found, _, _ in RECORDED if len(found.answers) > 1}
    assert len(different) > len(cases.OPTIONS) * 0.8
    assert recorded_answers.FILE.stat().st_size < 300_000


@pytest.mark.slow
@pytest.mark.skipif(not ORACLES, reason=f"{cases.VARIABLE} names no oracle")
@pytest.mark.parametrize("option", cases.OPTIONS)
@pytest.mark.parametrize("version", ORACLES)
def test_random_sequences(version: str, option: str) -> None:
    if not cases.exists_in(option, version):
        pytest.skip("torch has the option since a later version")
    for seed in range(SEQUENCES):
        case = cases.random_case(option, seed)
        theirs = cases.oracle_answer(ORACLES[version], case)
        difference = cases.first_difference(cases.our_answer(version, case), theirs)
        assert not difference, f"seed {seed}, {case.arguments()}: {difference}"
