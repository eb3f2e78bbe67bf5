"""The communication of a rank as a person reads it: what is waited for, and behind what the rest hides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.report.tables import NumberTable, name_text

if TYPE_CHECKING:
    from trainfit.costs.summary import StepTime

_NOTICEABLE = 0.01


def communication_words(time: StepTime) -> str:
    """Say how long communication takes, by how much the step is longer for it, and how long stages wait."""
    words = ""
    if time.communication_seconds:
        words = f" Communication takes {format_seconds(time.communication_seconds)}, "
        longer = time.exposed_communication_seconds
        if longer < _NOTICEABLE * time.communication_seconds:
            words += "all of it hidden behind the rest of the step."
        else:
            words += f"and the step is {format_seconds(longer)} longer for it; the rest is hidden."
    if time.bubble_seconds:
        words += (
            f" The stages of the pipeline wait for each other: this one {format_seconds(time.bubble_seconds)}"
            f", all of them together {time.bubble_share:.0%} of their time."
        )
    return words


def units_table(time: StepTime, most: int) -> NumberTable:
    """Return the units whose communication is waited for longest."""
    columns = ("collectives", "exchanged", "takes", "waited for", "hides behind")
    table = NumberTable("communication by unit (predicted)", *columns, least=("exchanged", "collectives"))
    for unit in time.units[:most]:
        table.add_row(
            name_text(unit.unit),
            format_count(unit.collectives),
            format_bytes(unit.bytes),
            format_seconds(unit.seconds),
            format_seconds(unit.exposed_seconds) if unit.exposed_seconds else Text("-", "dim"),
            name_text(unit.hidden_behind) if unit.hidden_behind else Text("-", "dim"),
        )
    return table
