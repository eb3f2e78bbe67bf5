"""Two results beside each other as a person reads them: what grew, by how much, and where."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from trainfit.basics.units import format_count
from trainfit.basics.visible_text import short_operator
from trainfit.report.amounts import Amount, at_most
from trainfit.report.diff_data import Change, DiffData, ModuleChange, OperatorChange, RegionChange
from trainfit.report.figure_words import FIGURE_WORDS, MODULE_STATES, peak_moved, written, written_change
from trainfit.report.tables import Cell, NumberTable, name_text, safe, stacked

_MOST_ROWS = 10
_MOST_OTHERS = 8
_LEAST = ("share", "old", "new")
"""What is left out first where there is no room: the change is what one asks for."""


def diff_view(data: DiffData, amount: Amount = "usual") -> RenderableType:
    """Lay out a diff: the peak and the time, what was asked for differently, then what grew."""
    if amount == "verdict":
        return Text(". ").join([_headline(data), *_verdict(data)])
    most = at_most(_MOST_ROWS, amount)
    telling = [one for one in data.modules if not one.explained_inside]
    return stacked(
        [_headline(data), *_verdict(data)],
        _others(data),
        [safe(moved)] if (moved := peak_moved(data)) else [],
        [_figures(data)],
        [_categories(data.categories)] if data.categories else [],
        [_modules(telling[:most])] if telling else [],
        [_operators(data.operators[:most])] if data.operators else [],
        [_regions(data.regions[:most])] if data.regions else [],
        footer=_footer(data, len(telling), most),
    )


def _headline(data: DiffData) -> Text:
    parts: list[Text] = []
    for one in data.figures:
        if one.name in ("peak_bytes", "step_seconds"):
            line = Text(f"{FIGURE_WORDS[one.name]} ").append(written(one.name, one.old)).append(" to ")
            line.append(written(one.name, one.new), "bold")
            parts.append(line.append(", ").append_text(_grown(one)))
    return Text("; ").join(parts)


def _verdict(data: DiffData) -> list[Text]:
    if data.max_peak_share is None and data.max_time_share is None:
        return []
    if not data.exceeded:
        return [Text("Within what is allowed.", "green")]
    return [Text(f"More than allowed: {text}.", "bold red") for text in data.exceeded]


def _grown(one: Change) -> Text:
    if not one.change:
        return Text("unchanged", "green")
    text = written_change(one.name, one.change)
    share = "" if one.share is None else f" ({one.share:+.2%})"
    return Text(f"{text}{share}", "yellow" if one.change > 0 else "green")


def _others(data: DiffData) -> list[RenderableType]:
    """Say clearly what was not the same question."""
    if not data.others:
        return []
    lines: list[RenderableType] = [Text("The two were not asked for the same:", "yellow")]
    lines += [safe(f"  {one.name}: {one.old} before, {one.new} now") for one in data.others[:_MOST_OTHERS]]
    if len(data.others) > _MOST_OTHERS:
        lines.append(Text(f"  and {len(data.others) - _MOST_OTHERS} more; --json lists all", "dim"))
    return lines


def _figures(data: DiffData) -> NumberTable:
    table = NumberTable("predicted", "old", "new", "change", "share", least=_LEAST)
    for one in data.figures:
        if one.change or one.name in ("peak_bytes", "step_seconds"):
            table.add_row(FIGURE_WORDS[one.name], *_cells(one, one.name))
    return table


def _cells(one: Change, unit: str) -> list[Cell]:
    share = "" if one.share is None or not one.change else f"{one.share:+.2%}"
    return [written(unit, one.old), written(unit, one.new), _signed(unit, one.change), share]


def _signed(unit: str, change: float | None) -> Cell:
    if not change:
        return Text("-", "dim")
    return Text(written_change(unit, change), "yellow" if change > 0 else "green")


def _categories(changed: Sequence[Change]) -> NumberTable:
    table = NumberTable("at the peak", "old", "new", "change", "share", least=_LEAST)
    for one in changed:
        table.add_row(safe(one.name.replace("_", " ")), *_cells(one, "_bytes"))
    return table


def _modules(changed: Sequence[ModuleChange]) -> NumberTable:
    table = NumberTable("modules", "at the peak", "parameters", "activations", "time")
    roots = {one.module.partition(".")[0] for one in changed}
    root = f"{roots.pop()}." if len(roots) == 1 else ""
    for one in changed:
        label = name_text(one.module.removeprefix(root))
        if one.old_count != one.new_count and one.old_count and one.new_count:
            label.append(f" ({one.old_count} × to {one.new_count} ×)", "dim")
        elif max(one.old_count, one.new_count) > 1:
            label.append(f" ({max(one.old_count, one.new_count)} ×)", "dim")
        if MODULE_STATES[one.state]:
            label.append(f" {MODULE_STATES[one.state]}", "cyan")
        elif one.was:
            label.append(" was ", "cyan").append_text(name_text(one.was.removeprefix(root), "cyan"))
        table.add_row(
            label,
            _signed("_bytes", one.held_change_bytes),
            _signed("_bytes", one.parameter_change_bytes),
            _signed("_bytes", one.activation_change_bytes),
            _signed("_seconds", one.change_seconds),
        )
    return table


def _operators(changed: Sequence[OperatorChange]) -> NumberTable:
    table = NumberTable("operators", "change", "old", "new", "calls")
    for one in changed:
        calls = format_count(one.new_calls)
        if one.new_calls != one.old_calls:
            calls = f"{format_count(one.old_calls)} to {calls}"
        times = (written("_seconds", seconds) for seconds in (one.old_seconds, one.new_seconds))
        table.add_row(
            name_text(short_operator(one.operator)), _signed("_seconds", one.change_seconds), *times, calls
        )
    return table


def _regions(changed: Sequence[RegionChange]) -> NumberTable:
    table = NumberTable("checkpointed", "regions", "keep", "recompute")
    for one in changed:
        table.add_row(
            name_text(one.module),
            f"{one.old_regions} to {one.new_regions}"
            if one.old_regions != one.new_regions
            else str(one.new_regions),
            _signed("_bytes", one.new_kept_bytes - one.old_kept_bytes),
            _signed("_seconds", one.new_recompute_seconds - one.old_recompute_seconds),
        )
    return table


def _footer(data: DiffData, modules: int, most: int) -> str:
    more = [
        f"{count - most} more {what}"
        for what, count in (("modules", modules), ("operators", len(data.operators)))
        if count > most
    ]
    return f"{' and '.join(more)} changed; -v, --json and --csv list all" if more else ""
