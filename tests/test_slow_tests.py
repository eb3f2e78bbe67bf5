"""The list of slow tests names tests that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from slow_tests import ONE_OF, SLOW

TESTS = Path(__file__).parent


@pytest.mark.parametrize("name", sorted({*SLOW, *ONE_OF}))
def test_a_name_in_the_list_is_that_of_a_test(name: str) -> None:
    file, _, function = name.partition("::")
    text = (TESTS / file).read_text()
    if function:
        assert f"def {function.partition('[')[0]}" in text
