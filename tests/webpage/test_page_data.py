"""What is in a page: every byte of the timeline, nothing that could become markup, figures that agree."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib
import json
import pkgutil
import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import hostile_steps
import numpy as np
import pytest

import trainfit
from trainfit import report
from trainfit.basics.units import format_bytes
from trainfit.basics.visible_text import visible
from trainfit.costs.schedule import schedule
from trainfit.report import reading
from trainfit.report.compared_data import RunData
from trainfit.report.compiled_checks import CompiledVerificationData
from trainfit.report.data import Compared
from trainfit.report.rank_report import RankData, RankVerificationData
from trainfit.report.scale_data import ScaleData
from trainfit.report.sharding_data import ShardingData
from trainfit.report.swept_data import SweepData
from trainfit.webpage import embedding
from trainfit.webpage import page as page_module
from trainfit.webpage.memory_columns import aligned
from trainfit.webpage.notebook_views import notebook_html
from trainfit.webpage.page import page_html
from trainfit.webpage.static_picture import static_picture
from trainfit.webpage.trade_offs import regions_alike

CSS = embedding.asset("page.css")


def embedded(page: str) -> dict[str, Any]:
    """Return the data of a page as a browser finds it."""
    text = re.search(r'<script type="application/json" id="tf-data">(.*?)</script>', page, re.DOTALL)
    assert text is not None
    found: dict[str, Any] = json.loads(text[1])
    return found


def part_of(page: str, kind: str) -> dict[str, Any]:
    return next(part for part in embedded(page)["parts"] if part["kind"] == kind)


@pytest.fixture(scope="module")
def page(estimated: trainfit.Estimate) -> str:
    return page_html(reading.estimate_data(estimated), estimated)


def test_the_columns_are_the_timeline(page: str, estimated: trainfit.Estimate) -> None:
    """Put together again, the differences are the bytes of every category at every op."""
    curve = part_of(page, "memory")["curves"][0]
    total = np.zeros(curve["ops"], dtype=np.int64)
    for category in curve["categories"]:
        values = np.zeros(curve["ops"], dtype=np.int64)
        values[list(accumulate(category["at"]))] = category["by"]
        total += np.cumsum(values)
    assert total.tolist() == estimated.timeline.used_bytes.tolist()
    strings = embedded(page)["strings"]
    assert [strings[name] for name in curve["names"]] == [
        estimated.trace.op_name(op) for op in range(curve["ops"])
    ]
    assert estimated.time is not None
    assert sum(curve["nanoseconds"]) == pytest.approx(estimated.time.step_seconds * 1e9, abs=1)


def test_lanes_have_the_time_of_the_schedule(page: str, estimated: trainfit.Estimate) -> None:
    assert estimated.costs is not None
    compute, host = part_of(page, "memory")["lanes"][0]
    laid_out = schedule(estimated.trace, estimated.costs)
    assert (compute["label"], host["label"]) == ("compute", "host")
    assert sum(compute["durations"]) == pytest.approx(laid_out.busy_seconds * 1e9, rel=1e-3)
    assert sum(host["durations"]) == pytest.approx(laid_out.host_seconds.sum() * 1e9, rel=1e-3)
    starts = list(accumulate(compute["starts"]))
    ends = [start + duration for start, duration in zip(starts, compute["durations"])]
    assert all(start >= end - 1 for start, end in zip(starts[1:], ends))  # a queue runs in order


def test_the_treemap_has_every_byte_of_the_peak(page: str, estimated: trainfit.Estimate) -> None:
    tree = part_of(page, "treemap")
    sizes = [sum(pairs[1::2]) for pairs in (*tree["owned"], tree["outside"])]
    assert sum(sizes) == estimated.peak_bytes
    outside = dict(zip(tree["outside"][::2], tree["outside"][1::2]))
    state = tree["categories"].index("optimizer_state")
    assert outside[state] == estimated.by_category["optimizer_state"]


def test_a_planned_step_is_laid_over_the_plain_one(planned: Any) -> None:
    """Every op of the plain step is one of the planned step, in order; all others recompute."""
    runs = aligned(planned.timeline.trace, planned.trace)
    assert runs is not None and planned.plan.regions
    pairs = [(here + i, there + i) for here, there, length in runs for i in range(length)]
    assert [there for _, there in pairs] == list(range(len(planned.trace.ops)))
    here = {number for number, _ in pairs}
    others = [op for number, op in enumerate(planned.timeline.trace.ops) if number not in here]
    assert others and all(op.recompute for op in others)
    assert aligned(planned.trace, planned.timeline.trace) is None


def test_groups_of_regions_are_all_regions(planned: Any) -> None:
    groups = regions_alike(planned.plan, planned.trace)
    assert sum(len(group.members) for group in groups) == len(planned.plan.regions)
    seconds = sum(region.recompute_seconds for group in groups for region in group.members)
    assert seconds == pytest.approx(sum(region.recompute_seconds for region in planned.plan.regions))


def test_the_first_screen_says_the_answer(page: str, estimated: trainfit.Estimate) -> None:
    answer = html.unescape(re.sub(r"<[^>]+>", " ", page.split('id="answer"')[1].split("</section>")[0]))
    assert "Fits" in answer and estimated.time is not None
    assert format_bytes(estimated.smallest_memory_bytes) in answer
    assert format_bytes(estimated.memory.reserved_peak_bytes) in answer
    largest = max(estimated.by_category.values())
    assert f"dominate the peak: {format_bytes(largest)} of {format_bytes(estimated.peak_bytes)}" in answer


def test_nothing_in_the_data_is_markup(hostile: trainfit.Estimate) -> None:
    page = page_html(reading.estimate_data(hostile), hostile)
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page and "\u2028" not in page and "\u202e<" not in page
    assert "<b onmouseover" not in page
    assert "Content-Security-Policy" in page.split("<style>")[0]
    names = embedded(page)["strings"]
    shown = [visible(hostile_name) for hostile_name in hostile_steps.NAMES]
    assert all(any(name.endswith(f".{one}") for name in names) for one in shown)
    # What would turn a name around is seen as what it is.
    assert any(name.endswith(r".evil\u202egnp_exe\u2028\u2029\x00&amp;") for name in names)
    assert "\u202e" not in page


def test_a_lone_surrogate_can_be_written() -> None:
    text = embedding.embedded_json({"name": "a\ud800b"})
    assert json.loads(text) == {"name": r"a\ud800b"}
    text.encode()


def test_only_the_page_s_own_scripts_may_run(page: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for text in (*scripts, *styles):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in html.unescape(policy[1])
    assert "unsafe" not in policy[1] and "default-src 'none'" in html.unescape(policy[1])
    assert not re.search(r'(src|href)="(?!#)', page) and "style=" not in page


def test_every_kind_of_result_has_a_page() -> None:
    """Whatever a command presents can be asked for as a report."""
    modules = [
        importlib.import_module(f"trainfit.report.{one.name}")
        for one in pkgutil.iter_modules(report.__path__)
    ]
    kinds = {kind for one in modules for kind in vars(one).values() if isinstance(kind, type)}
    # Parts of others, and those that have no page.
    tables = {RankData, RunData, SweepData, ScaleData, ShardingData, CompiledVerificationData}
    shown = {kind for kind in kinds if kind.__name__.endswith("Data")} - tables
    assert shown == set(page_module._ANSWERS) == set(page_module._SECTIONS) and len(shown) >= 8


def test_ranks_are_shown_as_predicted_and_measured(estimated: trainfit.Estimate) -> None:
    def rank(number: int, measured: int) -> RankData:
        same = Compared[Any](500, 500)
        peak = Compared(1000, measured)
        return RankData(
            number, peak, peak.error or 0.0, same, same, same, same, measured, 3, *[None] * 3, (), ()
        )

    ranks = (rank(0, 1000), rank(1, 800))
    subject = reading.estimate_data(estimated).subject
    peak = ranks[0].peak_bytes
    data = RankVerificationData(subject, 2, peak, 0.25, None, (), None, None, None, ranks)
    page = page_html(data, None)
    assert "The predicted peak is up to 25.00% too high" in page and "2 ranks ran" in page
    (table,) = embedded(page)["parts"]
    figures = {column["name"]: column["values"] for column in table["columns"]}
    assert figures["measured"][0] == 1000 and figures["measured"][5] == 800
    assert figures["error"][0] == 0 and figures["error"][5] == 0.25


def test_a_page_is_written_whole(page: str, estimated: trainfit.Estimate, tmp_path: Path) -> None:
    from trainfit.webpage.page import write_page

    write_page(reading.estimate_data(estimated), estimated, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    assert list(tmp_path.iterdir()) == [tmp_path / "page.html"]


def test_the_still_picture_keeps_the_peak(estimated: trainfit.Estimate) -> None:
    limit = estimated.peak_bytes * 3 // 2
    picture = static_picture(estimated.timeline, limit)
    heights = [float(y) for y in re.findall(r"[\d.]+,([\d.]+)", picture)]
    top = limit * 1.05
    assert "tf-limit" in picture and min(heights) == pytest.approx(
        260 * (1 - estimated.peak_bytes / top), abs=0.06
    )


def test_a_limit_far_above_does_not_flatten_the_still_picture(estimated: trainfit.Estimate) -> None:
    """A small model on a large GPU: the peak is near the top, and the limit is said in words."""
    picture = static_picture(estimated.timeline, 400 * estimated.peak_bytes)
    heights = [float(y) for y in re.findall(r"[\d.]+,([\d.]+)", picture)]
    assert min(heights) == pytest.approx(260 * (1 - 1 / 1.05), abs=0.06) and "tf-limit" not in picture
    shown = notebook_html(estimated)
    limit = format_bytes(estimated.device.usable_bytes)
    assert f"the limit, {limit}, is far above the picture" in shown


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--tf-([\w-]+): (#[0-9a-f]{6});", block))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_the_contrast_that_wcag_asks_for(theme: str) -> None:
    light = colours(CSS.split("@media")[0])
    dark = light | colours(CSS.split(':root[data-theme="dark"] {')[1].split("}")[0])
    found = light if theme == "light" else dark
    for back in ("back", "surface", "band"):
        for text in ("text", "soft", "accent", "good", "close", "bad", "plain"):
            assert contrast(found[text], found[back]) >= 4.5, (text, back)
        assert contrast(found["edge"], found[back]) >= 3, back
    for tone in ("good", "close", "bad", "plain"):
        assert contrast(found[tone], found[f"{tone}-back"]) >= 4.5, tone
    for phase in ("forward", "backward", "optimizer", "recompute"):
        assert contrast("#ffffff", found[f"p-{phase}"]) >= 4.5, phase  # names of ops stand on them


def test_both_dark_themes_are_the_same() -> None:
    by_system = CSS.split('data-theme="light"]) {')[1].split("}")[0]
    chosen = CSS.split(':root[data-theme="dark"] {')[1].split("}")[0]
    assert by_system.split() == chosen.split()
