"""Bytes, seconds and counts as people write and read them. The only place where GiB and ms exist."""

from __future__ import annotations

import re
from fractions import Fraction

from trainfit.errors import OptionError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_FACTORS = {
    "b": 1,
    **{f"{letter}ib": 1024 ** (power + 1) for power, letter in enumerate("kmgtpe")},
    **{f"{letter}b": 1000 ** (power + 1) for power, letter in enumerate("kmgtpe")},
}
_SIZE = re.compile(r"(?P<number>[0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)\s*(?P<unit>[a-z]+|%)", re.IGNORECASE)
_LARGEST_BYTES = 2**63 - 1
_LONGEST_SIZE = 60  # characters; Python refuses to read numbers of thousands of digits
_EXAMPLES = "write it like 24GiB, 24GB, 512MB, 1234567B or 80%"


def format_bytes(size: int) -> str:
    """Write a number of bytes with the binary unit that suits it: `512 B`, `1.50 GiB`."""
    magnitude = abs(size)
    if magnitude < 1024:
        return f"{size} B"
    power = 1
    # The next unit takes over where rounding to two decimals would print 1024.00 of this one.
    while power < len(_BINARY) - 1 and magnitude >= (1024 - 0.005) * 1024**power:
        power += 1
    return f"{size / 1024**power:.2f} {_BINARY[power]}"


def parse_size(text: str, device_bytes: int | None = None) -> int:
    """Read a size in bytes: a number with a unit, or a percentage of `device_bytes`.

    `KiB`, `MiB`, ... are powers of 1024 and `KB`, `MB`, ... powers of 1000, in any case. The result is
    rounded down, so that a budget is never exceeded by rounding.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or len(text) > _LONGEST_SIZE:
        raise OptionError(f"{text!r:.300} is not a size: {_EXAMPLES}.")
    number = Fraction(match["number"].replace(",", "").replace("_", ""))
    unit = match["unit"].lower()
    if unit == "%":
        size = _share_of_device(text, number, device_bytes)
    elif unit in _FACTORS:
        size = int(number * _FACTORS[unit])
    else:
        raise OptionError(f"{match['unit']!r} in {text!r} is not a unit of size: {_EXAMPLES}.")
    if size < 1:
        raise OptionError(f"{text!r} is less than one byte: {_EXAMPLES}.")
    if size > _LARGEST_BYTES:
        raise OptionError(f"{text!r} is more than any machine has: {_EXAMPLES}.")
    return size


def format_seconds(seconds: float) -> str:
    """Write a duration with the unit that suits it: `12.3 µs`, `4.56 ms`, `7.89 s`, `2 min 03 s`."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    for factor, unit in ((1e6, "µs"), (1e3, "ms"), (1.0, "s")):
        scaled = seconds * factor
        # 999.5 would print as 1000 of this unit, and belongs to the next.
        if scaled < (59.95 if unit == "s" else 999.5):
            return f"{_three_digits(scaled)} {unit}"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_count(count: int) -> str:
    """Write a count with its thousands separated: `124,439,808`."""
    return f"{count:,}"


def _share_of_device(text: str, percent: Fraction, device_bytes: int | None) -> int:
    if device_bytes is None:
        raise OptionError(
            f"{text!r} is a share of a device, but no device is given; name one or write bytes."
        )
    if percent > 100:
        raise OptionError(f"{text!r} is more than the whole device.")
    return int(percent * device_bytes / 100)


def _three_digits(value: float) -> str:
    """Write a value below 1000 with three significant digits, and zero as `0`."""
    if value == 0:
        return "0"
    if value < 9.995:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
