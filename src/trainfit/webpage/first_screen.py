"""The first screen as HTML: the same in the page and in a notebook, and whole without any script."""

from __future__ import annotations

import re

from trainfit.basics.units import format_bytes
from trainfit.webpage.embedding import escaped
from trainfit.webpage.page_answers import FirstScreen, MemoryBar

_SIGNS = {"good": "M4 10.5l4 4 8-9", "close": "M10 4v8M10 16v.01", "bad": "M5 5l10 10M15 5L5 15"}
STACKED = (
    *("parameter", "buffer", "optimizer_state", "input", "gradient", "communication", "activation"),
    "temporary",
)
"""The categories from the bottom of a stack to its top: what stays the longest first."""
_WIDTH, _HEIGHT = 1000, 40


def first_screen_html(answer: FirstScreen, level: int = 1) -> str:
    """Return the first screen; `level` is that of its heading."""
    sign = _SIGNS.get(answer.tone)
    icon = f'<svg viewBox="0 0 20 20" aria-hidden="true"><path d="{sign}"/></svg>' if sign else ""
    parts = [
        f'<p class="tf-subject"><bdi>{escaped(answer.target)}</bdi> <span>{answer.joined}</span> '
        f"<bdi>{escaped(answer.place)}</bdi></p>",
        f'<h{level} class="tf-verdict tf-{answer.tone}">{icon}{escaped(answer.verdict)}</h{level}>',
        f'<p class="tf-sentence">{escaped(answer.sentence)}</p>',
    ]
    if answer.bar is not None:
        parts.append(_bar(answer.bar))
    parts.append(_figures(answer))
    if answer.dominates:
        parts.append(f'<p class="tf-dominates">{escaped(answer.dominates)}</p>')
    if answer.setting:
        parts.append(f'<p class="tf-setting">{_breakable(answer.setting)}</p>')
    if answer.description:
        parts.append(f'<p class="tf-settings">{escaped(answer.description)}</p>')
    return "\n".join(parts)


def _breakable(text: str) -> str:
    """Return text whose long words may be broken where a reader would."""
    return re.sub(r"([=_:])(?=\w)", r"\1<wbr>", escaped(text))


def _figures(answer: FirstScreen) -> str:
    items = (
        f"<div><dt>{escaped(figure.label)}</dt><dd><b>{escaped(figure.value)}</b>"
        f"<small>{escaped(figure.note)}</small></dd></div>"
        for figure in answer.figures
    )
    return f'<dl class="tf-figures">{"".join(items)}</dl>'


def _bar(bar: MemoryBar) -> str:
    """Draw what the step needs, by category, against what there is."""
    peak = sum(bar.by_category.values())
    scale = _WIDTH / (max(bar.needed_bytes, bar.limit_bytes, peak, 1) * 1.02)
    rows: list[str] = []
    legend: list[str] = []
    at = 0
    for name in STACKED:
        size = bar.by_category.get(name, 0)
        if size:
            rows.append(_rectangle(at, size, scale, f"tf-c-{name}"))
            words = f"{escaped(name.replace('_', ' '))} <b>{format_bytes(size)}</b>"
            legend.append(f'<li><i class="tf-c-{name}"></i>{words}</li>')
            at += size
    if bar.needed_bytes > peak:
        rows.append(_rectangle(peak, bar.needed_bytes - peak, scale, "tf-reserved"))
        extra = format_bytes(bar.needed_bytes - peak)
        legend.append(f'<li><i class="tf-reserved"></i>allocator and libraries <b>{extra}</b></li>')
    limit = bar.limit_bytes * scale
    if bar.margin_bytes:
        margin = bar.margin_bytes * scale
        x = limit - margin
        rows.append(f'<rect class="tf-margin" x="{x:.1f}" y="0" width="{margin:.1f}" height="56"/>')
        words = f"margin for what is not simulated <b>{format_bytes(bar.margin_bytes)}</b>"
        legend.append(f'<li><i class="tf-margin"></i>{words}</li>')
    rows.append(f'<line class="tf-limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="0" y2="56"/>')
    limit_text = f"{escaped(bar.limit_label)} <b>{format_bytes(bar.limit_bytes)}</b>"
    legend.append(f'<li><i class="tf-limit"></i>{limit_text}</li>')
    said = f"needs {format_bytes(bar.needed_bytes)}; {bar.limit_label} {format_bytes(bar.limit_bytes)}"
    return (
        f'<svg class="tf-bar" viewBox="0 0 {_WIDTH} 56" preserveAspectRatio="none" role="img" '
        f'aria-label="{escaped(said)}">{"".join(rows)}</svg><ul class="tf-legend">{"".join(legend)}</ul>'
    )


def _rectangle(at: int, size: int, scale: float, kind: str) -> str:
    x, width = at * scale, size * scale
    return f'<rect class="{kind}" x="{x:.1f}" y="8" width="{width:.1f}" height="{_HEIGHT}"/>'
