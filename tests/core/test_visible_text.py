"""Names as they are shown: nothing in them that cannot be seen, and the middle left out of long ones."""

from __future__ import annotations

import pytest

from trainfit.basics.visible_text import shortened, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("blocks.0", "blocks.0"),
        ("a\u202eb", r"a\u202eb"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
        ("two\nlines", "two\nlines"),
        ("größe", "größe"),
    ],
)
def test_what_cannot_be_seen_is_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_long_names_keep_both_ends() -> None:
    name = "begin." + "x" * 500 + ".end"
    found = shortened(name, 21)
    assert len(found) == 21 and found.startswith("begin.") and found.endswith(".end") and "…" in found
    assert shortened("short", 5) == "short"
