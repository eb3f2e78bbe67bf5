"""Operator arguments as JSON text: how a signature says exactly how its operator was called.

The text is a list `[positional, keyword]`. Plain values stand for themselves; everything else is an object
with one key: `{"tensor": 0}` is the signature's input number 0, `{"dtype": "float32"}`,
`{"device": "cpu"}`, `{"layout": "strided"}`, `{"memory_format": "channels_last"}`, `{"float": "inf"}`,
`{"complex": [re, im]}`; `{"group": "0"}` is a communication group. What cannot be written is
`{"other": description}`.
"""

from __future__ import annotations

import json
import math
from typing import Any


def encode(positional: list[Any], keyword: dict[str, Any]) -> str:
    """Write encoded arguments as one line of JSON."""
    return json.dumps([positional, keyword], separators=(",", ":"), allow_nan=False)


def decode(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Read what `encode` wrote; values stay in their encoded form."""
    positional, keyword = json.loads(text)
    return positional, keyword


def encode_number(value: complex) -> Any:
    """Encode a number; JSON has neither infinities nor complex numbers."""
    if isinstance(value, complex):
        return {"complex": [encode_number(value.real), encode_number(value.imag)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value
