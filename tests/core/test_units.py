"""Sizes, durations and counts as people write and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.basics.units import format_bytes, format_count, format_seconds, parse_size
from trainfit.errors import OptionError

GIB = 2**30


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20 - 1, "1.00 MiB"),  # not 1024.00 KiB
        (3 * GIB // 2, "1.50 GiB"),
        (80 * GIB, "80.00 GiB"),
        (2**40, "1.00 TiB"),
        (-GIB, "-1.00 GiB"),
        (2**70, "1024.00 EiB"),
    ],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GIB),
        ("24gib", 24 * GIB),
        (" 24 GiB ", 24 * GIB),
        ("24GB", 24 * 10**9),
        ("512MB", 512 * 10**6),
        ("1234567B", 1234567),
        ("1,234,567B", 1234567),
        ("1.5GiB", 3 * GIB // 2),
        (".5KiB", 512),
        ("0.1KB", 100),  # exact, not 99 through a binary float
        ("2TiB", 2 * 2**40),
    ],
)
def test_parse_size(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_share_of_the_device_is_rounded_down() -> None:
    assert parse_size("80%", device_bytes=1001) == 800
    assert parse_size("100%", device_bytes=1001) == 1001


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "is not a size"),
        ("24", "is not a size: write it like 24GiB"),
        ("GiB", "is not a size"),
        ("-5GiB", "is not a size"),
        ("nan", "is not a size"),
        ("nanGiB", "is not a size"),
        ("infGiB", "is not a size"),
        ("1e9B", "is not a size"),
        ("9" * 5000 + "B", "is not a size"),
        ("24 potatoes", "'potatoes' in '24 potatoes' is not a unit of size"),
        ("24G", "'G' in '24G' is not a unit of size"),
        ("0GiB", "less than one byte"),
        ("0.5B", "less than one byte"),
        ("0%", "less than one byte"),
        ("99999999999EiB", "more than any machine has"),
        ("101%", "more than the whole device"),
    ],
)
def test_nonsense_is_refused_with_an_example(text: str, fragment: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_size(text, device_bytes=GIB)
    assert fragment in str(caught.value)


def test_a_share_needs_a_device() -> None:
    with pytest.raises(OptionError, match="no device is given"):
        parse_size("80%")


@given(st.integers(1, 2**62))
def test_bytes_read_back_what_was_written(size: int) -> None:
    assert parse_size(f"{size}B") == size


@given(st.integers(1, 2**62))
def test_a_formatted_size_reads_back_to_two_decimals(size: int) -> None:
    text = format_bytes(size)
    unit = parse_size(f"1{text.split()[1]}")
    assert abs(parse_size(text) - size) <= 0.005 * unit + 1


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_one_clear_error(text: str) -> None:
    try:
        assert parse_size(text, device_bytes=GIB) >= 1
    except OptionError as error:
        assert repr(text) in str(error)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (1.234e-5, "12.3 µs"),
        (0.00456, "4.56 ms"),
        (0.9996, "1.00 s"),
        (7.894, "7.89 s"),
        (45.67, "45.7 s"),
        (59.96, "1 min 00 s"),
        (123.4, "2 min 03 s"),
        (3599.7, "1 h 00 min"),
        (3900.0, "1 h 05 min"),
        (-0.5, "-500 ms"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_format_count() -> None:
    assert format_count(124439808) == "124,439,808"
