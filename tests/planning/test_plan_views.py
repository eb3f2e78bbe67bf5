"""What is shown of plans and frontiers: every region with -v, waiting, what a setting is worth."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import RenderableType

import trainfit
from trainfit.api import choose
from trainfit.api.request import Request
from trainfit.report import reading
from trainfit.report.added_words import setting_of_plan
from trainfit.report.tables import show
from trainfit.report.text_plans import frontier_view, plan_view
from trainfit.webpage.page import page_html


def printed(view: RenderableType) -> str:
    stream = io.StringIO()
    show(view, stream)
    return stream.getvalue()


@pytest.fixture(scope="module")
def found() -> tuple[Any, Any]:
    """Ops of a tiny model are much shorter than what Python takes to checkpoint them."""
    trace = trainfit.capture("gpt2-tiny", device="h100")
    peak = trainfit.estimate(trace, device="h100").smallest_memory_bytes
    plan = choose.plan_step(Request(trace, "h100"), f"{int(0.8 * peak)}B")
    return plan, choose.frontier_step(Request(trace, "h100"), 3)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is folded."""
    monkeypatch.setenv("COLUMNS", "200")


def test_every_region_is_listed_where_all_is_wanted(found: tuple[Any, Any]) -> None:
    data = reading.plan_data(found[0])
    modules = [region["module"] for region in data.regions]
    assert len(modules) > 1
    data = replace(data, groups=(replace(data.groups[0], calls=len(modules)),))  # as if all were alike
    all_of_it = printed(plan_view(data, "all"))
    assert all(module in all_of_it for module in modules) and not re.search(r"and \d+ more", all_of_it)
    assert f"and {len(modules) - 1} more" in printed(plan_view(data))


def test_time_that_is_not_recomputation_is_shown(found: tuple[Any, Any]) -> None:
    plan, frontier = (reading.plan_data(found[0]), reading.frontier_data(found[1]))
    added = plan.step_seconds - plan.baseline["step_seconds"]
    assert plan.waiting_seconds == pytest.approx(added - plan.recompute_seconds) and plan.waiting_seconds > 0
    assert "waits for host" in printed(frontier_view(frontier))
    page = page_html(frontier, found[1])
    assert "waits for host" in page and "for the host" in page_html(plan, found[0])
    # On a device that hides it there is nothing to show.
    points = tuple(replace(point, waiting_seconds=0.0) for point in frontier.points)
    assert "waits" not in printed(frontier_view(replace(frontier, points=points)))


def test_usual_ways_have_added_time_and_a_verdict(found: tuple[Any, Any]) -> None:
    data = reading.frontier_data(found[1])
    fastest = data.points[-1].step_seconds
    full = next(way for way in data.ways if way.name == "full")
    assert full.added == pytest.approx(full.step_seconds / fastest - 1) and full.verdict == "fits"


def test_close_is_explained_only_where_something_is_close(found: tuple[Any, Any]) -> None:
    data = reading.frontier_data(found[1])
    assert "close: within" not in printed(frontier_view(data))
    close = replace(data.points[0], verdict="too close to call")
    assert "close: within" in printed(frontier_view(replace(data, points=(close, *data.points[1:]))))


def test_a_setting_that_helps_is_in_the_report(found: tuple[Any, Any]) -> None:
    plain = replace(reading.plan_data(found[0]), expandable=None)
    assert setting_of_plan(plain) == ""
    data = replace(plain, expandable={"step_seconds": 1.0, "added": 0.01})
    said = setting_of_plan(data)
    assert "expandable_segments:True a plan adds 1.0% instead of" in said
    assert said in " ".join(printed(plan_view(data)).split())
    assert "expandable_" in page_html(data, found[0]).split("<section")[1]
