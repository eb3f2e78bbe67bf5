"""World sizes, global batches and dimensions as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from trainfit.errors import OptionError
from trainfit.scaling.scale_text import parse_dimensions, parse_global_batch, parse_world_sizes


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ("8..64", (8, 16, 32, 64)),
        ("8..100", (8, 16, 32, 64, 100)),
        ("8,16, 64", (8, 16, 64)),
        ("64,8..16", (8, 16, 64)),
        ("7", (7,)),
        (8, (8,)),
        ([16, 8, 16], (8, 16)),
    ],
)
def test_world_sizes(given: Any, sizes: tuple[int, ...]) -> None:
    assert parse_world_sizes(given) == sizes


@pytest.mark.parametrize(
    "given", ["", "8..", "64..8", "0", "x", "8,", "-8", "1..99999999", True, 1.5, ["8"], []]
)
def test_no_world_sizes(given: Any) -> None:
    with pytest.raises(OptionError, match="--world-sizes"):
        parse_world_sizes(given)


@pytest.mark.parametrize(
    ("given", "seq", "sequences"),
    [
        ("512", 8192, 512),
        (512, None, 512),
        ("512 sequences", 8192, 512),
        ("4Mi tokens", 8192, 512),
        ("8192000 tokens", 8192, 1000),
        ("1k samples", None, 1000),
    ],
)
def test_global_batches(given: Any, seq: int | None, sequences: int) -> None:
    found = parse_global_batch(given)
    assert found is not None
    assert found.in_sequences(seq) == sequences


def test_tokens_that_are_no_sequences() -> None:
    found = parse_global_batch("4M tokens")
    assert found is not None
    with pytest.raises(
        OptionError, match=r"the next smaller is --global-batch 488 sequences, 3,997,696 tokens"
    ):
        found.in_sequences(8192)
    with pytest.raises(OptionError, match="does not say how many tokens"):
        found.in_sequences(None)


def test_dimensions() -> None:
    assert parse_dimensions(None) is None
    assert parse_dimensions("dp, tp") == ("fsdp", "tp")
    assert parse_dimensions("fsdp,ep") == ("fsdp", "ep")
    with pytest.raises(OptionError, match="'zp' is no dimension"):
        parse_dimensions("fsdp,zp")
