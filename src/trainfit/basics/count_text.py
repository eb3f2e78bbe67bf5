"""Counts as people write them: `10B` tokens, `1.2M` samples."""

from __future__ import annotations

import re
from fractions import Fraction

from trainfit.errors import OptionError

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_COUNT = re.compile(r"(?P<number>[0-9][0-9_,]*(?:\.[0-9]+)?)\s*(?P<unit>[kmbt]?)", re.ASCII | re.IGNORECASE)
_LONGEST = 40
"""Characters: Python refuses to read numbers of thousands of digits."""
MOST = 10**18
_EXAMPLES = "write it like 10B, 1.2M, 300k or 1000000"


def parse_count(given: str | int | float, flag: str) -> int:
    """Read a whole number above zero; `k`, `M`, `B` and `T` are thousands, millions, billions, trillions.

    Programs may give a number instead. `flag` is what the message calls it.
    """
    if isinstance(given, str):
        found = _COUNT.fullmatch(given.strip())
        if found is None or len(given) > _LONGEST:
            raise OptionError(f"{flag} {given!r:.80} is not a count: {_EXAMPLES}.")
        number = Fraction(found["number"].replace(",", "").replace("_", ""))
        number *= _FACTORS[found["unit"].lower()]
    elif isinstance(given, bool) or not isinstance(given, int | float) or not abs(given) <= MOST:
        raise OptionError(f"{flag} {given!r:.80} is not a count: {_EXAMPLES}.")
    else:
        number = Fraction(given)
    if number.denominator != 1 or not 1 <= number <= MOST:
        raise OptionError(f"{flag} must be a whole number from 1 to {MOST:.0e}, got {given!r:.80}.")
    return int(number)


def short_count(count: int) -> str:
    """Write a count so that it can be read again, and as short as that allows: `10B`, `1.2M`, `1,234,567`."""
    for unit in "TBMk":
        factor = _FACTORS[unit.lower()]
        if count >= factor and count % (factor // 100) == 0:
            return f"{count / factor:g}{unit}"
    return f"{count:,}"
