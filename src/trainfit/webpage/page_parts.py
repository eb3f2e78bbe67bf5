"""What a page is put together from: sections, and in them parts, which a script of the same kind draws."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Part = dict[str, Any]
"""Plain data; `kind` names what draws it: `memory`, `treemap`, `table`, `trade_off` or `bars`."""

KINDS_OF_COLUMNS = (
    *("text", "bytes", "seconds", "count", "share", "added", "error", "large"),
    *("bytes_change", "seconds_change", "money", "figure"),
)
"""How values are written and compared; a `figure` is written already, where the rows have several units."""


@dataclass
class Strings:
    """Texts that occur many times, each once; elsewhere are their numbers."""

    texts: list[str] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def number(self, text: str) -> int:
        """Return the number of a text."""
        found = self._numbers.setdefault(text, len(self.texts))
        if found == len(self.texts):
            self.texts.append(text)
        return found


@dataclass(frozen=True)
class Section:
    """One part of the page with a heading and a sentence."""

    name: str
    title: str
    lead: str = ""
    parts: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences in a list."""


def column(
    name: str, kind: str, values: list[Any], about: str = "", *, minor: bool = False
) -> dict[str, Any]:
    """Return a column of a table; what is None is shown as nothing, and what is minor not on a phone."""
    assert kind in KINDS_OF_COLUMNS, kind
    found = {"name": name, "kind": kind, "values": values, **({"about": about} if about else {})}
    return {**found, "minor": True} if minor else found


def table(caption: str, *columns: dict[str, Any], sorted_by: int | None = None, name: str = "") -> Part:
    """Return a table; `sorted_by` is the column that the rows are in the order of, the most first."""
    return {"kind": "table", "caption": caption, "columns": list(columns), "sorted": sorted_by, "name": name}


def bar(label: str, value: float | int, style: str = "other") -> dict[str, Any]:
    """Return one of the bars of a part."""
    return {"label": label, "value": value, "style": style}


def bars(caption: str, unit: str, rows: list[dict[str, Any]]) -> Part:
    """Return figures beside each other as bars; the unit is a kind of column."""
    return {"kind": "bars", "caption": caption, "unit": unit, "rows": rows}


def gaps(numbers: list[int]) -> list[int]:
    """Return each number without the one before it: shorter to write, and a running sum brings them back."""
    return [number - before for number, before in zip(numbers, [0, *numbers])]
