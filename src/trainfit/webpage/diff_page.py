"""The page of a diff: what grew between two results, by how much and where, in the terminal's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainfit.basics.units import format_bytes, format_count
from trainfit.basics.visible_text import short_operator
from trainfit.report.diff_data import Change, DiffData
from trainfit.report.figure_words import FIGURE_WORDS, MODULE_STATES, peak_moved, written, written_change
from trainfit.webpage.page_answers import BAD, CLOSE, GOOD, PLAIN, Figure, FirstScreen
from trainfit.webpage.page_parts import Part, Section, Strings, bar, bars, column, table

_OF_OLD = "The change as a share of the old figure"


def diff_answer(data: DiffData) -> FirstScreen:
    """Say by how much the peak grew and what that is, and whether it is allowed."""
    grown = int(data.figure("peak_bytes").change or 0)
    if data.exceeded:
        verdict, tone = "Grew by more than is allowed", BAD
    elif not grown:
        verdict, tone = "The peak is the same", GOOD
    else:
        verdict = f"The peak {'grew' if grown > 0 else 'fell'} by {format_bytes(abs(grown))}"
        tone = CLOSE if grown > 0 else GOOD
    shown = [one for one in data.figures if one.name in ("peak_bytes", "step_seconds")]
    return FirstScreen(
        target=data.new.name,
        place=data.old.name,
        joined="compared with",
        verdict=verdict,
        tone=tone if data.figures else PLAIN,
        sentence=_sentence(data),
        figures=tuple(
            Figure(FIGURE_WORDS[one.name], written(one.name, one.new), _note(one)) for one in shown
        ),
        description=f"{data.kind} of {data.new.target} on {data.new.device}",
        dominates=peak_moved(data),
    )


def _sentence(data: DiffData) -> str:
    """Say what is more than allowed, and which category and which modules changed the most."""
    found = [f"{text[:1].upper()}{text[1:]}." for text in data.exceeded]
    most = []
    if data.categories:
        one = data.categories[0]
        most.append(f"{one.name.replace('_', ' ')}, {written_change('_bytes', one.change)}")
    # A module whose change is that of one inside of it says less than that one; the model says nothing.
    inner = [one for one in data.modules if not one.explained_inside and "." in one.module]
    if inner and inner[0].held_change_bytes:
        most.append(f"{inner[0].module}, {written_change('_bytes', inner[0].held_change_bytes)}")
    if most:
        found.append(f"At the peak the most changed in {' and in '.join(most)} (predicted).")
    elif not data.exceeded:
        found.append("Nothing that is alive at the peak has changed (predicted).")
    return " ".join(found)


def _note(one: Change) -> str:
    if not one.change:
        return "unchanged, predicted"
    share = "" if one.share is None else f" ({one.share:+.2%})"
    return f"{written_change(one.name, one.change)}{share}; was {written(one.name, one.old)}, predicted"


def diff_sections(data: DiffData, result: Any, strings: Strings) -> list[Section]:
    """Return figures, categories, modules, operators and regions that are not the same."""
    asked = tuple(f"{one.name}: {one.old} before, {one.new} now" for one in data.others)
    found = [Section("asked", "Not asked for the same", "", (), asked)] if asked else []
    found.append(Section("figures", "Figures", "", (_figures(data),)))
    if data.categories:
        parts = (_bars(data.categories), _categories(data.categories))
        found.append(Section("categories", "Memory at the peak", "", parts))
    if data.modules:
        lead = "Modules that differ by numbers are one row, and each has everything inside of it."
        found.append(Section("modules", "Modules", lead, (_modules(data),)))
    if data.operators:
        found.append(Section("operators", "Operators", "", (_operators(data),)))
    if data.regions:
        found.append(Section("regions", "Plans", "", (_regions(data),)))
    return found


def _figures(data: DiffData) -> Part:
    rows = data.figures
    return table(
        "Every figure (predicted)",
        column("figure", "text", [FIGURE_WORDS[one.name] for one in rows]),
        column("old", "figure", [written(one.name, one.old) for one in rows], minor=True),
        column("new", "figure", [written(one.name, one.new) for one in rows]),
        column(
            "change", "figure", [written_change(one.name, one.change) if one.change else None for one in rows]
        ),
        column("share", "added", [one.share if one.change else None for one in rows], _OF_OLD),
        name="figures",
    )


def _bars(rows: Sequence[Change]) -> Part:
    found = [
        bar(f"{one.name.replace('_', ' ')}, {what}", getattr(one, what) or 0, style)
        for one in rows
        for what, style in (("old", "other"), ("new", "predicted"))
    ]
    return bars("Old and new (predicted)", "bytes", found)


def _categories(rows: Sequence[Change]) -> Part:
    return table(
        "By category (predicted)",
        column("at the peak", "text", [one.name.replace("_", " ") for one in rows]),
        column("old", "bytes", [one.old for one in rows]),
        column("new", "bytes", [one.new for one in rows]),
        column("change", "bytes_change", [one.change for one in rows]),
        column("share", "added", [one.share for one in rows], _OF_OLD),
        name="categories",
    )


def _modules(data: DiffData) -> Part:
    rows = data.modules
    states = [MODULE_STATES[one.state] or (f"was {one.was}" if one.was else "") for one in rows]
    counts = [
        f"{one.old_count} to {one.new_count}" if one.old_count != one.new_count else str(one.new_count)
        for one in rows
    ]
    held = [(one.old_held_bytes, one.held_change_bytes) for one in rows]
    parts = [
        column("module", "text", [one.module for one in rows]),
        column("state", "text", states),
        column("class", "text", [one.class_name for one in rows], minor=True),
        column("modules", "figure", counts, "How many of them", minor=True),
        column("at the peak, old", "bytes", [one.old_held_bytes for one in rows], minor=True),
        column("at the peak, new", "bytes", [one.new_held_bytes for one in rows], minor=True),
        column("change", "bytes_change", [change for _, change in held], "At the peak"),
        column("share", "added", [change / old if old and change else None for old, change in held], _OF_OLD),
        column("parameters", "bytes_change", [one.parameter_change_bytes for one in rows], "The change"),
        column(
            "kept for backward", "bytes_change", [one.activation_change_bytes for one in rows], "The change"
        ),
        column("time", "seconds_change", [one.change_seconds for one in rows], "The change"),
    ]
    told = [one for one in parts if any(one["values"])]  # a column in which nothing changed says nothing
    return table("Modules that are not the same (predicted)", *told, name="modules")


def _operators(data: DiffData) -> Part:
    rows = data.operators
    calls = [
        f"{format_count(one.old_calls)} to {format_count(one.new_calls)}"
        if one.old_calls != one.new_calls
        else format_count(one.new_calls)
        for one in rows
    ]
    times = [(one.old_seconds, one.change_seconds) for one in rows]
    return table(
        "Operators that are not the same (predicted)",
        column("operator", "text", [short_operator(one.operator) for one in rows]),
        column("calls", "figure", calls, minor=True),
        column("old", "seconds", [one.old_seconds for one in rows], "Time of all calls", minor=True),
        column("new", "seconds", [one.new_seconds for one in rows], "Time of all calls"),
        column("change", "seconds_change", [change for _, change in times]),
        column(
            "share", "added", [change / old if old and change else None for old, change in times], _OF_OLD
        ),
        name="operators",
    )


def _regions(data: DiffData) -> Part:
    rows = data.regions
    kept = [one.new_kept_bytes - one.old_kept_bytes for one in rows]
    seconds = [one.new_recompute_seconds - one.old_recompute_seconds for one in rows]
    return table(
        "Checkpointed modules that are not the same (predicted)",
        column("checkpointed", "text", [one.module for one in rows]),
        column("regions, old", "count", [one.old_regions for one in rows]),
        column("regions, new", "count", [one.new_regions for one in rows]),
        column("keep, old", "bytes", [one.old_kept_bytes for one in rows]),
        column("keep, new", "bytes", [one.new_kept_bytes for one in rows]),
        column("keep, change", "bytes_change", kept),
        column("recompute, old", "seconds", [one.old_recompute_seconds for one in rows]),
        column("recompute, new", "seconds", [one.new_recompute_seconds for one in rows]),
        column("recompute, change", "seconds_change", seconds),
        name="regions",
    )


def diff_footer(data: DiffData) -> str:
    """Say what was compared."""
    sides = (
        f"{side.name}: {format_count(side.ops)} ops, torch {side.torch}" for side in (data.old, data.new)
    )
    return "; ".join(sides)
