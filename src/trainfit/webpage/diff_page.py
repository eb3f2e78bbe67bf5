"""The page of a diff: two results beside each other, what grew and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.report.diff_data import Change, DiffData
from trainfit.webpage.page_answers import BAD, CLOSE, GOOD, PLAIN, Figure, FirstScreen
from trainfit.webpage.page_parts import Part, Section, Strings, column, table

_STATES = {"added": "new", "removed": "gone", "changed": "", "renamed": "renamed"}


def diff_answer(data: DiffData) -> FirstScreen:
    """Say by how much the peak and the time grew, and whether that is allowed."""
    peak = data.figure("peak_bytes")
    grown = peak.change or 0
    if data.exceeded:
        verdict, tone = "Grew by more than is allowed", BAD
    elif not grown:
        verdict, tone = "The peak is the same", GOOD
    else:
        verdict = f"The peak {'grew' if grown > 0 else 'fell'} by {format_bytes(int(abs(grown)))}"
        tone = CLOSE if grown > 0 else GOOD
    shown = [one for one in data.figures if one.name in ("peak_bytes", "step_seconds")]
    sentences = [f"{_words(one.name)} {_written(one, one.old)} to {_written(one, one.new)}" for one in shown]
    figures = [Figure(_words(one.name), _written(one, one.new), _note(one)) for one in shown]
    return FirstScreen(
        target=data.new.name,
        place=data.old.name,
        joined="compared with",
        verdict=verdict,
        tone=tone if data.figures else PLAIN,
        sentence=f"From {'; '.join((*sentences, *data.exceeded))} (predicted).",
        figures=tuple(figures),
        description=f"{data.kind} of {data.new.target} on {data.new.device}",
        dominates=_moved(data),
    )


def _note(one: Change) -> str:
    if not one.change:
        return "unchanged, predicted"
    share = "" if one.share is None else f" ({one.share:+.2%})"
    return f"{'+' if one.change > 0 else '-'}{_written(one, abs(one.change))}{share}, predicted"


def _moved(data: DiffData) -> str:
    """Say where the peak is, if it is elsewhere now: then what is alive at it is something else."""
    old, new = data.old.peak_at, data.new.peak_at
    return f"The peak moved: from {old}, to {new}." if old and new and old != new else ""


def _words(name: str) -> str:
    return name.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")


def _written(one: Change, value: float | None) -> str:
    if value is None:
        return "unknown"
    if one.name.endswith("_seconds"):
        return format_seconds(value)
    return format_bytes(int(value)) if one.name.endswith("_bytes") else format_count(int(value))


def diff_sections(data: DiffData, result: Any, strings: Strings) -> list[Section]:
    """Return figures, categories, modules, operators and regions that are not the same."""
    asked = tuple(f"{one.name}: {one.old} before, {one.new} now" for one in data.others)
    found = [Section("asked", "Not asked for the same", "", (), asked)] if asked else []
    found.append(Section("figures", "Figures", "", (_figures(data),)))
    if data.categories:
        parts = (_bars(data.categories), _categories(data.categories))
        found.append(Section("categories", "Memory at the peak", "", parts))
    if data.modules:
        found.append(
            Section("modules", "Modules", "Modules that differ by numbers are one row.", (_modules(data),))
        )
    if data.operators:
        found.append(Section("operators", "Operators", "", (_operators(data),)))
    if data.regions:
        found.append(Section("regions", "Plans", "", (_regions(data),)))
    return found


def _figures(data: DiffData) -> Part:
    rows = data.figures
    return table(
        "Every figure (predicted)",
        column("figure", "text", [_words(one.name) for one in rows]),
        column("old", "text", [_written(one, one.old) for one in rows]),
        column("new", "text", [_written(one, one.new) for one in rows]),
        column("grew by", "added", [one.share for one in rows]),
        name="figures",
    )


def _bars(rows: Sequence[Change]) -> Part:
    bars = [
        {"label": f"{one.name.replace('_', ' ')}, {what}", "value": getattr(one, what) or 0, "style": style}
        for one in rows
        for what, style in (("old", "other"), ("new", "predicted"))
    ]
    return {
        "kind": "bars",
        "caption": "What changed, before and now (predicted)",
        "unit": "bytes",
        "rows": bars,
    }


def _categories(rows: Sequence[Change]) -> Part:
    return table(
        "By category (predicted)",
        column("category", "text", [one.name.replace("_", " ") for one in rows]),
        column("old", "bytes", [one.old for one in rows]),
        column("new", "bytes", [one.new for one in rows]),
        column("change", "bytes", [one.change for one in rows]),
        column("grew by", "added", [one.share for one in rows]),
        name="categories",
    )


def _modules(data: DiffData) -> Part:
    rows = data.modules
    return table(
        "Modules that are not the same (predicted)",
        column("module", "text", [one.module for one in rows]),
        column("was", "text", [one.was or _STATES[one.state] for one in rows]),
        column("class", "text", [one.class_name for one in rows]),
        column("before", "count", [one.old_count for one in rows], "How many of them"),
        column("now", "count", [one.new_count for one in rows], "How many of them"),
        column("at the peak", "bytes", [one.held_change_bytes for one in rows], "The change"),
        column("parameters", "bytes", [one.parameter_change_bytes for one in rows], "The change"),
        column("kept for backward", "bytes", [one.activation_change_bytes for one in rows], "The change"),
        column("time", "seconds", [one.change_seconds for one in rows], "The change"),
        name="modules",
    )


def _operators(data: DiffData) -> Part:
    rows = data.operators
    return table(
        "Operators that are not the same (predicted)",
        column("operator", "text", [one.operator for one in rows]),
        column("calls before", "count", [one.old_calls for one in rows]),
        column("calls now", "count", [one.new_calls for one in rows]),
        column("time before", "seconds", [one.old_seconds for one in rows]),
        column("time now", "seconds", [one.new_seconds for one in rows]),
        column("change", "seconds", [one.change_seconds for one in rows]),
        name="operators",
    )


def _regions(data: DiffData) -> Part:
    rows = data.regions
    return table(
        "Checkpointed modules that are not the same (predicted)",
        column("module", "text", [one.module for one in rows]),
        column("regions before", "count", [one.old_regions for one in rows]),
        column("regions now", "count", [one.new_regions for one in rows]),
        column("keep", "bytes", [one.new_kept_bytes - one.old_kept_bytes for one in rows], "The change"),
        column(
            "recompute",
            "seconds",
            [one.new_recompute_seconds - one.old_recompute_seconds for one in rows],
            "The change",
        ),
        name="regions",
    )


def diff_footer(data: DiffData) -> str:
    """Say what was compared."""
    sides = (
        f"{side.name}: {format_count(side.ops)} ops, torch {side.torch}" for side in (data.old, data.new)
    )
    return "; ".join(sides)
