"""Several values of one option, as they are typed: `1,2,4,8`, `max`, or two devices."""

from __future__ import annotations

import os

from trainfit.errors import OptionError

MAX = "max"
MOST_VALUES = 100
"""A longer list is a sweep."""

Size = int | str
"""A number, or `max`."""


def read_sizes(text: str, flag: str) -> tuple[Size, ...]:
    """Read sizes as they are typed, each once; whether a number can be one is checked where it is used."""
    found: list[Size] = []
    for part in _parts(text, flag):
        if part.lower() == MAX:
            found.append(MAX)
            continue
        try:
            found.append(int(part))
        except ValueError:
            raise OptionError(
                f"{flag} must be a whole number, several with commas between them as in 1,2,4,8, or max; "
                f"got {part!r:.100}."
            ) from None
    return tuple(dict.fromkeys(found))


def read_names(text: str, flag: str) -> tuple[str, ...]:
    """Read names with commas between them, each once; what is the name of a file is one, commas or not."""
    if "," not in text or os.path.exists(text):
        return (text,)
    return tuple(dict.fromkeys(_parts(text, flag)))


def _parts(text: str, flag: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 1 and not all(parts):
        raise OptionError(f"{flag} {text!r:.100} has a comma with nothing beside it.")
    if len(parts) > MOST_VALUES:
        raise OptionError(f"{flag} takes {MOST_VALUES} values at most, got {len(parts)}.")
    return parts
