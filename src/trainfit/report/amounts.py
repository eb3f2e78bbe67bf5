"""How much of a result a person wants to see: the verdict alone, the usual, or everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from rich.console import RenderableType
from rich.text import Text

from trainfit.basics.units import format_seconds
from trainfit.report.tables import NumberTable

Amount = Literal["verdict", "usual", "all"]
WITHOUT_END = 1_000_000_000


def at_most(usual: int, amount: Amount) -> int:
    """Return how many lines of something are shown."""
    return WITHOUT_END if amount == "all" else usual


def verdict_alone(line: Text, warnings: Sequence[str] = ()) -> Text:
    """Return the one line that `-q` prints; that there is more to know is not kept back."""
    count = len(set(warnings))
    if not count:
        return line
    noted = f" ({count} note{'s' if count > 1 else ''}, shown without -q)"
    return line.copy().append(noted, "yellow")


def stage_times(seconds: Mapping[str, float], amount: Amount) -> list[RenderableType]:
    """Return how long each stage took on this machine, if everything is shown."""
    if amount != "all":
        return []
    table = NumberTable("time taken here", "wall time")
    for stage, value in seconds.items():
        table.add_row(stage, format_seconds(value))
    return [table]
