"""The page of `fit`: the ways side by side, and the lines of code that make each."""

from __future__ import annotations

from typing import Any

from trainfit.basics.units import format_bytes, format_seconds
from trainfit.report.fit_data import FitData, WayRow
from trainfit.webpage.page_answers import BAD, CLOSE, GOOD, Figure, FirstScreen
from trainfit.webpage.page_parts import Part, Section, Strings, bar, bars, column, table


def fit_answer(data: FitData) -> FirstScreen:
    """Say whether the step fits, and what is fastest."""
    base, budget = data.as_it_is, format_bytes(data.budget_bytes)
    needs = format_bytes(base.smallest_memory_bytes)
    verdict = "Fits as it is" if data.fits else "Fits with changes"
    figures = [Figure("as it is", needs, f"of {budget}, {format_seconds(base.step_seconds)} per step")]
    if not data.ways_found:
        sentence = f"Nothing that was tried fits into {budget}; as it is the step needs {needs} (predicted)."
        verdict = "Nothing fits" if data.complete else "Nothing found in time"
        return FirstScreen(data.subject.target, data.subject.device, verdict, BAD, sentence, tuple(figures))
    best = data.ways_found[0]
    if best.name == base.name:
        sentence = "Nothing that was tried is faster (predicted)."
    else:
        sentence = (
            f"The fastest way: {best.name}. It runs in {format_bytes(best.smallest_memory_bytes)} and takes "
            f"{format_seconds(best.step_seconds)} per step (predicted); results: {best.results}."
        )
        place = f"{format_seconds(best.step_seconds)} per step"
        figures.append(Figure("the fastest way", format_bytes(best.smallest_memory_bytes), place))
    return FirstScreen(
        data.subject.target,
        data.subject.device,
        verdict,
        GOOD if data.fits else CLOSE,
        sentence,
        tuple(figures),
        description=data.subject.description,
    )


def fit_sections(data: FitData, result: Any, strings: Strings) -> list[Section]:
    """Return the ways, their code, and what was not possible."""
    found = []
    if data.ways_found:
        lead = (
            "None of them is beaten by another that changes results no more, does no more things differently "
            "and is no slower. Each was captured as it would run."
        )
        found.append(Section("ways", "Ways that fit", lead, (_times(data), _ways(data))))
        found.append(Section("code", "How each is made", "", (_code(data.ways_found),)))
    if data.impossible:
        notes = tuple(f"{one['change']}: {one['reason']}" for one in data.impossible)
        found.append(Section("impossible", "Not possible here", "", (), notes))
    notes = tuple(dict.fromkeys(data.subject.warnings))
    if not data.complete:
        notes = ("Time was up before every combination that might be better was looked at.", *notes)
    return [*found, Section("notes", "Notes", "", (), notes)] if notes else found


def _times(data: FitData) -> Part:
    rows = [bar(f"{n} {way.name}", way.step_seconds) for n, way in enumerate(data.ways_found, start=1)]
    if not data.fits:
        rows.append(bar(f"{data.as_it_is.name} (does not fit)", data.as_it_is.step_seconds))
    return bars("Time of a step (predicted)", "seconds", rows)


def _ways(data: FitData) -> Part:
    ways = data.ways_found
    tokens = data.as_it_is.tokens_per_second is not None
    per_second = [way.tokens_per_second if tokens else way.samples_per_second for way in ways]
    return table(
        "Ways that fit (predicted)",
        column("way", "text", [way.name for way in ways]),
        column("runs in", "bytes", [way.smallest_memory_bytes for way in ways], "The least memory"),
        column("peak", "bytes", [way.peak_bytes for way in ways], minor=True),
        column("step", "seconds", [way.step_seconds for way in ways]),
        column("tokens/s" if tokens else "samples/s", "large", per_second, minor=True),
        column("results", "text", [way.results for way in ways]),
    )


def _code(ways: tuple[WayRow, ...]) -> Part:
    rows = [(way.name, line) for way in ways for line in way.code]
    return table(
        "Lines of code",
        column("way", "text", [name for name, _ in rows]),
        column("line", "text", [line for _, line in rows]),
    )
