"""Files as they come, generated: valid ones in which bytes, values or whole parts have been changed."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

DEEP = "@deep@"
"""Stands for 100,000 lists in each other, which `json.dumps` cannot write."""
HOSTILE = (
    *(None, True, False, 0, 1, -1, 2, 1.5, -0.0, 1e308, 1e-300, float("nan"), float("inf"), float("-inf")),
    *(2**31, 2**62, 2**62 + 1, 2**63, -(2**63), 2**70, 10**30, 10**400, -(10**400)),
    *("", "x", "-1", "\ud800", "ü𝕏", "\0", "</script>", "[bold]", "{0}", "a" * 5000, "NaN", DEEP),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": []}}, ["x"] * 50),
)
NO_SIZES = tuple(value for value in HOSTILE if not (type(value) in (int, float) and abs(value) > 64))
"""For models: a billion layers would be built one by one."""
SEALED = {"trace": "trace", "plan": "plan"}
"""Kinds of files that hold the hash of a part, with the name of that part."""


@dataclass(frozen=True)
class DamagedFile:
    """A file of a kind, and in words what was done to a valid one."""

    kind: str
    changes: tuple[str, ...]
    data: bytes

    def __repr__(self) -> str:
        """Leave the bytes out: what was done says enough."""
        return f"<{self.kind} file: {'; '.join(self.changes)}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show it so in a failure as well: hypothesis would write all fields."""
        printer.text(repr(self))


def _changed_value(draw: st.DrawFn, value: Any, hostile: tuple[Any, ...]) -> tuple[str, Any]:
    """Return another value in the place of one, and what was done."""
    odd: list[tuple[str, Callable[[], Any]]] = []
    if type(value) in (int, float):
        odd += [("+ 1", lambda: value + 1), ("- 1", lambda: value - 1), ("negated", lambda: -value)]
        odd += [
            ("* 10", lambda: value * 10),
            ("as text", lambda: str(value)),
            ("and a half", lambda: min(value, 2**40) + 0.5),
        ]
    if isinstance(value, str):
        odd += [("+ x", lambda: value + "x"), ("cut", lambda: value[:-1]), ("in a list", lambda: [value])]
    if isinstance(value, list) and value:
        odd += [
            ("reversed", lambda: value[::-1]),
            ("doubled", lambda: value + value),
            ("cut", lambda: value[:-1]),
        ]
        odd += [
            ("first only", lambda: value[:1]),
            ("last removed", lambda: value[:-1]),
            ("as pairs", lambda: [value]),
        ]
    if isinstance(value, dict) and value:
        odd += [("as a list", lambda: list(value.values())), ("emptied", dict)]
    if odd and draw(st.booleans()):
        words, change = draw(st.sampled_from(odd))
        return words, change()
    new = copy.deepcopy(draw(st.sampled_from(hostile)))  # the next change may be inside of it
    return f"= {new!r:.60}", new


def _change_somewhere(draw: st.DrawFn, document: Any, hostile: tuple[Any, ...]) -> str:
    """Change one place of a JSON document; places near the top are as likely as those deep inside."""
    path, inside = "", document
    while True:
        keys = list(inside) if isinstance(inside, dict) else range(len(inside))
        key = keys[draw(st.integers(0, len(keys) - 1))]
        path += f"[{key!r}]"
        child = inside[key]
        if not (isinstance(child, dict | list) and child) or draw(st.integers(0, 3)) == 3:
            break
        inside = child
    how = draw(st.sampled_from(("value", "value", "value", "value", "remove", "add", "swap")))
    if how == "remove":
        del inside[key]
        return f"{path} removed"
    if how == "add":
        new = copy.deepcopy(draw(st.sampled_from(hostile)))
        if isinstance(inside, dict):
            inside["unknown"] = new
        else:
            inside.append(new)
        return f"beside {path}: {new!r:.60}"
    if how == "swap":
        other = keys[draw(st.integers(0, len(keys) - 1))]
        inside[key], inside[other] = inside[other], inside[key]
        return f"{path} and [{other!r}] exchanged"
    words, inside[key] = _changed_value(draw, inside[key], hostile)
    return f"{path} {words}"


def _as_text(document: Any) -> str:
    return json.dumps(document, separators=(",", ":")).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)


def _sealed(document: dict[str, Any], part: str) -> dict[str, Any]:
    """Return a file with the hash that its content has now, so that more than the hash is looked at."""
    text = json.dumps(document.get(part), separators=(",", ":"), sort_keys=True)
    return document | {"sha256": hashlib.sha256(text.encode()).hexdigest()}


def _damaged_bytes(draw: st.DrawFn, data: bytes) -> tuple[str, bytes]:
    where = draw(st.integers(0, max(len(data) - 1, 0)))
    how = draw(
        st.sampled_from(("flip", "cut", "insert", "replace", "repeat", "compress", "before", "random"))
    )
    odd = draw(st.binary(min_size=1, max_size=8))
    if how == "flip":
        return f"bit of byte {where} flipped", data[:where] + bytes([data[where] ^ odd[0]]) + data[
            where + 1 :
        ]
    results = {
        "cut": (f"cut at byte {where}", data[:where]),
        "insert": (f"{odd!r} at byte {where}", data[:where] + odd + data[where:]),
        "replace": (f"{odd!r} over byte {where}", data[:where] + odd + data[where + len(odd) :]),
        "repeat": ("twice", data + data),
        "compress": ("compressed", gzip.compress(data)),
        "before": (f"{odd!r} before it", odd + data),
        "random": (f"nothing but {odd!r}", odd),
    }
    return results[how]


@st.composite
def damaged_files(draw: st.DrawFn, kind: str, valid: bytes) -> DamagedFile:
    """Draw a file: as it was, with up to three values changed, or with its bytes changed."""
    is_json = kind != "cache"
    words: list[str] = []
    data = valid
    if is_json and draw(st.integers(0, 3)):
        document, hostile = json.loads(valid), NO_SIZES if kind == "config" else HOSTILE
        for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
            if document:
                words.append(_change_somewhere(draw, document, hostile))
        if kind in SEALED and draw(st.integers(0, 7)):
            document = _sealed(document, SEALED[kind])
            words.append("sealed")
        text = _as_text(document)
        if draw(st.integers(0, 15)) == 15 and text.startswith('{"'):
            first = text[: text.index(":") + 1]
            text = text[0] + first[1:] + "1," + text[1:]
            words.append("first key twice")
        data = text.encode()
    else:
        change, data = _damaged_bytes(draw, data)
        words.append(change)
    return DamagedFile(kind, tuple(words), data)
