"""A result as one HTML file: `write_page`. It opens from disk, loads nothing, and works offline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainfit import __version__
from trainfit.basics.sealed_files import write_whole
from trainfit.basics.units import format_count, format_seconds
from trainfit.report.calibrations import CalibrationData
from trainfit.report.compared_data import ComparisonData
from trainfit.report.data import EstimateData, FrontierData, PlanData, Subject, VerificationData
from trainfit.report.diff_data import DiffData
from trainfit.report.fit_data import FitData
from trainfit.report.ordered_data import OrderData
from trainfit.report.rank_report import RankVerificationData
from trainfit.report.sizes_data import SizeData
from trainfit.traces.simulate import Timeline, simulate
from trainfit.traces.trace import Trace
from trainfit.webpage import (
    calibrated_page,
    compared_page,
    diff_page,
    fit_page,
    page_answers,
    page_sections,
    size_page,
)
from trainfit.webpage.embedding import asset, content_policy, embedded_json, escaped, script
from trainfit.webpage.first_screen import first_screen_html
from trainfit.webpage.page_answers import FirstScreen
from trainfit.webpage.page_parts import Section, Strings
from trainfit.webpage.peak_places import largest_part
from trainfit.webpage.static_picture import static_picture

_LONGEST_TITLE = 120
_ANSWERS: dict[type, Callable[..., FirstScreen]] = {
    EstimateData: page_answers.estimate_answer,
    PlanData: page_answers.plan_answer,
    FrontierData: page_answers.frontier_answer,
    VerificationData: page_answers.verification_answer,
    RankVerificationData: page_answers.rank_verification_answer,
    OrderData: page_answers.order_answer,
    CalibrationData: calibrated_page.calibration_answer,
    DiffData: diff_page.diff_answer,
    FitData: fit_page.fit_answer,
    SizeData: size_page.size_answer,
    ComparisonData: compared_page.comparison_answer,
}
_SAY_WHAT_DOMINATES = (EstimateData, PlanData, FrontierData)
_SECTIONS: dict[type, Callable[[Any, Any, Strings], list[Section]]] = {
    EstimateData: page_sections.estimate_sections,
    PlanData: page_sections.plan_sections,
    FrontierData: page_sections.frontier_sections,
    VerificationData: page_sections.verification_sections,
    RankVerificationData: page_sections.rank_verification_sections,
    OrderData: page_sections.order_sections,
    CalibrationData: calibrated_page.calibration_sections,
    DiffData: diff_page.diff_sections,
    FitData: fit_page.fit_sections,
    SizeData: size_page.size_sections,
    ComparisonData: compared_page.comparison_sections,
}


def write_page(data: Any, result: Any, path: str | Path) -> None:
    """Write what a reader sees of a result (`report.data`) as a page, whole or not at all."""
    write_whole(Path(path), page_html(data, result).encode())


def page_html(data: Any, result: Any) -> str:
    """Return the page of a result."""
    strings = Strings()
    timeline = timeline_of(result)
    first = answer(data, timeline)
    sections = _SECTIONS[type(data)](data, result, strings)
    parts = [part for section in sections for part in section.parts]
    embedded = embedded_json({"strings": strings.texts, "parts": parts})
    style, code = asset("page.css"), script()
    policy = content_policy(("style", style), ("script", code))
    picture = "" if timeline is None else static_picture(timeline, limit_of(data))
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            _head(first, policy, style),
            '<body class="tf-page">',
            '<a class="tf-skip" href="#answer">Skip to the answer</a>',
            _header(sections),
            "<main>",
            f'<section id="answer" class="tf-answer">{first_screen_html(first)}</section>',
            *_sections(sections, picture),
            "</main>",
            _footer(data),
            f'<script type="application/json" id="tf-data">{embedded}</script>',
            f"<script>{code}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def answer(data: Any, timeline: Timeline | None) -> FirstScreen:
    """Return the first screen of a result, whose step has this timeline."""
    if isinstance(data, _SAY_WHAT_DOMINATES):
        return _ANSWERS[type(data)](data, None if timeline is None else largest_part(timeline))
    return _ANSWERS[type(data)](data)


def timeline_of(result: Any) -> Timeline | None:
    """Return the memory of the step that a result is about; None if it is about none."""
    timeline = getattr(result, "timeline", None)
    if isinstance(timeline, Timeline):
        return timeline
    trace = getattr(result, "trace", None)
    return simulate(trace) if isinstance(trace, Trace) and trace.ops else None


def limit_of(data: Any) -> int | None:
    """Return the memory that there is for a step: the budget, or what the device has for tensors."""
    budget = getattr(data, "budget_bytes", None)
    if isinstance(budget, int):
        return budget
    subject = getattr(data, "subject", None)
    return subject.device_usable_bytes if isinstance(subject, Subject) else None


def _head(first: FirstScreen, policy: str, style: str) -> str:
    title = f"{first.target} {first.joined} {first.place}: {first.verdict}"
    return (
        '<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta name="generator" content="trainfit {__version__}">\n'
        f"<title>{escaped(title[:_LONGEST_TITLE])}</title>\n<style>{style}</style>\n</head>"
    )


def _header(sections: list[Section]) -> str:
    links = "".join(f'<li><a href="#{one.name}">{escaped(one.title)}</a></li>' for one in sections)
    return (
        '<header class="tf-header"><span class="tf-brand">trainfit</span>'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>'
        '<button type="button" id="tf-theme" hidden>Dark</button></header>'
    )


def _sections(sections: list[Section], picture: str) -> list[str]:
    """Return headings and sentences; what a script draws has a place with its part's number."""
    found, number = [], 0
    for section in sections:
        rows = [f'<section id="{section.name}"><h2>{escaped(section.title)}</h2>']
        if section.lead:
            rows.append(f'<p class="tf-lead">{escaped(section.lead)}</p>')
        for part in section.parts:
            still = picture if part["kind"] == "memory" else ""
            rows.append(f'<div class="tf-part" data-part="{number}">{still}</div>')
            number += 1
        if section.notes:
            rows.append("<ul>" + "".join(f"<li>{escaped(note)}</li>" for note in section.notes) + "</ul>")
        found.append("".join(rows) + "</section>")
    said = "Pictures and tables are drawn by a script, and none runs here; the answer above is whole."
    return [*found, f'<noscript><p class="tf-lead">{said}</p></noscript>']


def _footer(data: Any) -> str:
    text = f"{_how_found(data)}, trainfit {__version__}. Every figure is predicted unless it says measured."
    return f'<footer class="tf-footer"><p>{escaped(text)}</p></footer>'


def _how_found(data: Any) -> str:
    if isinstance(data, CalibrationData):
        return calibrated_page.calibration_footer(data)
    if isinstance(data, DiffData):
        return diff_page.diff_footer(data)
    if isinstance(data, ComparisonData):
        return compared_page.comparison_footer(data)
    about: Subject | OrderData = data if isinstance(data, OrderData) else data.subject
    what = "nodes" if isinstance(about, OrderData) else "ops"
    took = format_seconds(about.seconds.get("total", 0.0))
    return (
        f"{format_count(about.ops)} {what}, found in {took}{f', torch {about.torch}' if about.torch else ''}"
    )
