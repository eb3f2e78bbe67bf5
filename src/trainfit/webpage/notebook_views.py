"""What a notebook shows of a result: the first screen and the memory picture, without any script.

Notebooks keep scripts from running where nobody trusts them; this is whole without. Its style names only what
is inside of it, and takes the colours of text and background from the notebook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainfit.basics.units import format_bytes, format_count, format_seconds
from trainfit.plans.plan import Plan
from trainfit.traces.settings import describe
from trainfit.traces.simulate import Timeline
from trainfit.webpage.embedding import asset, escaped
from trainfit.webpage.first_screen import first_screen_html
from trainfit.webpage.page import answer, limit_of, timeline_of
from trainfit.webpage.page_answers import GOOD, Figure, FirstScreen
from trainfit.webpage.saved_report import data_of
from trainfit.webpage.static_picture import is_far, static_picture


def notebook_html(result: Any) -> str:
    """Return what a notebook shows of a result."""
    promise = _PROMISES.get(type(result).__name__)
    if promise is not None:
        return _boxed(first_screen_html(promise(result), level=3))
    data = data_of(result)
    timeline = timeline_of(result)
    screen = first_screen_html(answer(data, timeline), level=3)
    picture = "" if timeline is None else static_picture(timeline, limit_of(data))
    if timeline is not None and picture:
        said = escaped(_caption(timeline, limit_of(data)))
        picture = f'<figure><figcaption class="tf-settings">{said}</figcaption>{picture}</figure>'
    return _boxed(screen + picture)


def _caption(timeline: Timeline, limit_bytes: int | None) -> str:
    """Say what the picture shows, how high it is, and where the limit is."""
    peak = format_bytes(timeline.peak_bytes)
    text = f"Memory over the step, op by op, up to {peak} (predicted)"
    if limit_bytes is None:
        return text
    limit = format_bytes(limit_bytes)
    far = f"the limit, {limit}, is far above the picture"
    return f"{text}; {far if is_far(timeline, limit_bytes) else f'the line is the limit, {limit}'}"


def _boxed(content: str) -> str:
    return f'<div class="tf-notebook"><style>{asset("notebook.css")}</style>{content}</div>'


def _plan_promise(plan: Plan) -> FirstScreen:
    """Say what a plan promises; the step that it is for is not in it."""
    saved, base = plan.baseline_peak_bytes - plan.peak_bytes, plan.baseline_step_seconds
    added = plan.added_seconds / base if base else 0.0
    regions = format_count(len(plan.regions))
    return FirstScreen(
        target=plan.target,
        place=plan.device,
        verdict=f"A plan for {format_bytes(plan.budget_bytes)}",
        tone=GOOD,
        sentence=(
            f"It checkpoints {regions} calls of modules, which lowers the peak by {format_bytes(saved)} and "
            f"makes a step {added:.1%} longer (predicted). No plan of this kind is more than "
            f"{plan.gap:.2%} faster."
        ),
        figures=(
            Figure("peak with the plan", format_bytes(plan.peak_bytes), "predicted"),
            Figure("peak without", format_bytes(plan.baseline_peak_bytes), "predicted"),
            Figure("runs in", format_bytes(plan.memory_bytes), "predicted"),
            Figure("step with the plan", format_seconds(plan.step_seconds), f"{added:+.1%}, predicted"),
            Figure("step without", format_seconds(base), "predicted"),
        ),
        description=describe(plan.settings),
    )


_PROMISES: dict[str, Callable[[Any], FirstScreen]] = {"Plan": _plan_promise}
"""What `trainfit.plan` returns is the plan alone, to be saved and applied."""
