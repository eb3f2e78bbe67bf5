"""The page in a real browser: what a reader does with it, by mouse, by keys, on a phone, in the dark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from opened_pages import Open, kept

import trainfit
from trainfit.basics.units import format_bytes, format_seconds
from trainfit.basics.visible_text import short_operator
from trainfit.report.text_compared import money
from trainfit.webpage.embedding import asset

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

KINDS = ("estimate", "plan", "frontier", "order", "hostile", "diff", "compare")
WIDER_THAN_ITS_PLACE = """() => [...document.querySelectorAll(".tf-scroll")]
    .filter(one => one.scrollWidth > one.clientWidth + 1).map(one => one.getAttribute("aria-label"))"""
CORNER = 68  # pixels left of the picture's own area
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


def pointed_at(page: Page, share: float) -> str:
    """Point at a place in the memory picture, and return what is said there."""
    canvas = page.locator("canvas.tf-memory")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + CORNER + share * (box["width"] - CORNER - 12), box["y"] + 150)
    tip = page.locator(".tf-tip")
    tip.wait_for(state="visible")
    return tip.inner_text()


def painted(canvas: Locator) -> int:
    """Return how many different colours a canvas shows."""
    return int(
        canvas.evaluate(
            """canvas => {
                const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
                const seen = new Set();
                for (let i = 0; i < data.length; i += 16) seen.add(data.slice(i, i + 3).join());
                return seen.size;
            }"""
        )
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_loads_without_a_complaint(opened: Open, kind: str) -> None:
    page = opened(kind)
    assert page.locator("h1").inner_text()
    if kind not in ("diff", "compare"):
        assert painted(page.locator("canvas.tf-memory")) > 3
    if kind != "hostile":
        assert page.evaluate(WIDER_THAN_ITS_PLACE) == []
    assert page.locator(".tf-part:empty").count() == 0
    kept(page, f"{kind}-light", full_page=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_fits_a_phone_in_the_dark(opened: Open, kind: str) -> None:
    page = opened(kind, 390, 844, color_scheme="dark", has_touch=True)
    assert page.evaluate(SIDEWAYS) <= 0, "the page scrolls sideways"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 23)"
    kept(page, f"{kind}-phone-dark", full_page=True)


def test_a_tap_says_what_an_op_is_until_the_next_one(opened: Open) -> None:
    page = opened("estimate", 390, 844, has_touch=True, is_mobile=True)
    canvas = page.locator("canvas.tf-memory")
    canvas.scroll_into_view_if_needed()
    canvas.tap(position={"x": 120, "y": 150})
    page.wait_for_timeout(300)
    assert "in use, predicted" in page.locator(".tf-tip").inner_text()
    first = page.locator(".tf-tip").inner_text()
    canvas.tap(position={"x": 300, "y": 150})
    page.wait_for_timeout(300)
    assert page.locator(".tf-tip").inner_text() != first
    kept(page, "estimate-tapped")


def test_advice_is_read_on_a_phone_without_scrolling_sideways(opened: Open) -> None:
    page = opened("estimate", 390, 844, has_touch=True, is_mobile=True)
    cells = page.locator("[data-table=advice] td[data-label='in words']").all()
    assert cells
    for cell in cells:
        box = cell.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390


def test_no_tile_is_outside_of_the_treemap(opened: Open) -> None:
    page = opened("estimate")
    outside = page.evaluate(
        """() => [...document.querySelectorAll(".tf-treemap")].flatMap(area => {
            const around = area.getBoundingClientRect();
            const tiles = [...area.querySelectorAll(".tf-tile")].map(one => one.getBoundingClientRect());
            return tiles.filter(one => one.bottom > around.bottom + 1 || one.right > around.right + 1);
        }).length"""
    )
    assert outside == 0


def test_a_search_without_a_hit_says_so(opened: Open) -> None:
    page = opened("estimate")
    modules = page.locator("[data-table=modules]")
    modules.get_by_role("searchbox").fill("no such module")
    assert modules.locator("tbody").inner_text() == "Nothing here has “no such module” in it."


def test_paper_says_how_many_rows_there_are_and_repeats_the_heads(opened: Open) -> None:
    page = opened("estimate")
    page.emulate_media(media="print")
    modules = page.locator("[data-table=modules]")
    assert modules.locator(".tf-counted").inner_text() == "The first 25 of 47 rows."
    # A head is repeated on the next page where it may not be broken; buttons in it would be empty there.
    heads = modules.locator("thead")
    style = heads.evaluate("head => [getComputedStyle(head).display, getComputedStyle(head).breakInside]")
    assert style == ["table-header-group", "avoid"]
    assert not heads.locator("button").first.is_visible()
    assert heads.locator("th").nth(2).inner_text() == "at the peak"
    page.set_viewport_size({"width": 700, "height": 900})  # as wide as A4 between its margins
    assert page.evaluate(SIDEWAYS) <= 0, "the paper's content would be made smaller"


def test_a_diff_has_signed_changes(opened: Open) -> None:
    page = opened("diff")
    figures = page.locator("[data-table=figures]")
    heads = [head.split("\xa0")[0].strip() for head in figures.locator("thead th").all_inner_texts()]
    assert [head.split(" ")[0] for head in heads] == ["figure", "old", "new", "change", "share"]
    rows = {
        row.locator("th").inner_text(): row.locator("td").all_inner_texts()
        for row in figures.locator("tbody tr").all()
    }
    old, new, change = (float(text.removesuffix(" MiB")) for text in rows["peak"][:3])
    assert rows["peak"][2].startswith("+") and change == pytest.approx(new - old, abs=0.011)
    assert rows["peak"][3] == f"{new / old - 1:+.1%}"
    assert {"runs in", "before the step", "FLOPs"} <= set(rows)
    assert rows["before the step"][2:] == ["+8.00 KiB", "+0.1%"]
    changes = page.locator("[data-table=modules] td[data-label=change]").all_inner_texts()
    assert changes and all(text[0] in "+-–" for text in changes)


def test_pointing_says_what_an_op_is(opened: Open, estimated: trainfit.Estimate) -> None:
    page = opened("estimate")
    said = pointed_at(page, 0.2)
    assert "forward" in said and "in use, predicted" in said and "GPT2" in said
    assert "backward" in pointed_at(page, 0.6)
    kept(page, "estimate-hover")
    page.get_by_role("button", name="by op").click()
    count = len(estimated.trace.ops)
    last = pointed_at(page, 0.9995)
    assert f"op {count - 1:,} of {count:,}" in last and "optimizer" in last


def test_the_peak_is_never_lost_in_a_column_of_pixels(opened: Open, estimated: trainfit.Estimate) -> None:
    """Hundreds of ops share a column; the one that is shown is the highest of them."""
    page = opened("estimate", 500)
    page.get_by_role("button", name="by op").click()
    peak = estimated.timeline.peak_op
    said = pointed_at(page, (peak + 0.5) / len(estimated.trace.ops))
    assert f"op {peak:,} of" in said
    assert format_bytes(estimated.peak_bytes) in said


def test_keys_read_the_picture_op_by_op(opened: Open, estimated: trainfit.Estimate) -> None:
    page = opened("estimate")
    page.locator("canvas.tf-memory").focus()
    page.keyboard.press("p")
    spoken = page.locator("[aria-live]").first
    peak = estimated.timeline.peak_op
    assert spoken.inner_text().startswith(f"Op {peak}, ")
    page.keyboard.press("ArrowRight")
    assert spoken.inner_text().startswith(f"Op {peak + 1}, ")
    page.keyboard.press("Home")
    assert spoken.inner_text().startswith("Op 0, ")
    page.keyboard.press("Escape")
    assert not page.locator(".tf-tip").is_visible()


def test_dragging_zooms_and_a_double_click_returns(opened: Open) -> None:
    page = opened("estimate")
    page.get_by_role("button", name="by op").click()
    first = int(pointed_at(page, 0.0).split("op ")[1].split(" of")[0].replace(",", ""))
    box = page.locator("canvas.tf-memory").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 500, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 600, box["y"] + 100, steps=3)
    page.mouse.up()
    inside = int(pointed_at(page, 0.0).split("op ")[1].split(" of")[0].replace(",", ""))
    assert inside > first + 100
    page.mouse.wheel(0, 300)
    page.mouse.dblclick(box["x"] + 500, box["y"] + 100)
    assert int(pointed_at(page, 0.0).split("op ")[1].split(" of")[0].replace(",", "")) == first


def test_the_treemap_opens_and_closes_by_keys(opened: Open) -> None:
    page = opened("estimate")
    tiles = page.locator("button.tf-tile")
    tiles.first.focus()
    assert (tiles.first.get_attribute("aria-label") or "").startswith("GPT2: ")
    page.keyboard.press("Enter")
    crumbs = page.locator("#modules .tf-crumbs button")
    assert crumbs.all_inner_texts() == ["the step", "GPT2"]
    labels = [tile.get_attribute("aria-label") or "" for tile in page.locator("#modules .tf-tile").all()]
    assert any(label.startswith("blocks: ") for label in labels)
    kept(page, "estimate-treemap")
    page.keyboard.press("Escape")
    assert crumbs.all_inner_texts() == ["the step"]


def test_the_treemap_is_the_whole_peak(opened: Open, estimated: trainfit.Estimate) -> None:
    page = opened("estimate")
    about = page.locator("#modules .tf-hint").inner_text()
    peak = estimated.peak_bytes / 2**20
    assert about.startswith(f"the step: {peak:.2f} MiB at the peak, predicted. Too small to be seen: input, ")
    page.get_by_role("button", name="time", exact=True).click()
    assert "of forward and backward, predicted." in page.locator("#modules .tf-hint").inner_text()


def test_a_table_sorts_by_any_column(opened: Open, estimated: trainfit.Estimate) -> None:
    page = opened("estimate")
    table = page.locator("[data-table=operators]")
    assert estimated.time is not None
    table.get_by_role("button", name="calls").click()
    most = max(estimated.time.operators, key=lambda operator: operator.calls)
    assert table.locator("tbody td").first.inner_text() == str(most.calls)
    assert table.locator("th[aria-sort=descending]").inner_text().startswith("calls")
    table.get_by_role("button", name="operator").click()
    names = sorted(short_operator(operator.name) for operator in estimated.time.operators)
    assert table.locator("tbody th").first.inner_text() in names[:3]
    modules = page.locator("[data-table=modules]")
    modules.get_by_role("searchbox").fill("blocks.3.mlp")
    assert all("blocks.3.mlp" in text for text in modules.locator("tbody th").all_inner_texts())


def test_the_slider_shows_what_each_plan_recomputes(opened: Open) -> None:
    page = opened("frontier")
    slider = page.get_by_role("slider")
    about = page.locator(".tf-about")
    slider.focus()
    page.keyboard.press("Home")
    least = about.inner_text()
    assert least.startswith("Plan 1 of ") and "blocks" in least and "What this plan recomputes" in least
    kept(page, "frontier-slider")
    page.keyboard.press("End")
    assert "It recomputes nothing." in about.inner_text()
    assert {"full", "every second block"} <= set(page.locator(".tf-trade .tf-label").all_text_contents())


def test_a_plan_is_shown_over_the_step_without_it(opened: Open) -> None:
    page = opened("plan")
    assert "without the plan" in pointed_at(page, 0.3)
    page.get_by_role("button", name="without the plan").click()
    assert "with the plan" in pointed_at(page, 0.3)
    assert page.locator("[data-table=regions] tbody tr").count() >= 1


def test_a_comparison_shows_every_device_and_marks_the_best(opened: Open) -> None:
    page = opened("compare")
    pictures = page.locator("table.tf-bars")
    captions = pictures.locator("caption").all_inner_texts()
    assert [caption.split(" (")[0] for caption in captions] == [
        "Share of the device's memory that a step needs",
        "Time of a step",
        "Cost of 1B tokens",
    ]
    for picture in pictures.all():
        assert picture.locator("tr").count() == 2
        assert picture.locator(".tf-b-best").count() == 1
    page.locator("[data-table=runs] thead button", has_text="cost").click()
    assert page.locator("[data-table=runs] tbody tr").count() == 2


def test_light_and_dark_can_be_chosen(opened: Open) -> None:
    page = opened("estimate")
    canvas = page.locator("canvas.tf-memory")
    light = canvas.evaluate("canvas => canvas.toDataURL()")
    page.get_by_role("button", name="Change to dark colours").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 18, 23)"
    assert canvas.evaluate("canvas => canvas.toDataURL()") != light
    kept(page, "estimate-dark", full_page=True)


def test_paper_is_light(opened: Open) -> None:
    page = opened("estimate", color_scheme="dark")
    assert len(page.pdf(format="A4")) > 50_000
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator(".tf-header").is_visible()


def test_names_that_would_do_harm_are_only_names(opened: Open) -> None:
    page = opened("hostile")
    for share in (0.1, 0.3, 0.5, 0.9):
        pointed_at(page, share)
    page.locator("button.tf-tile").first.click()
    page.locator("summary").click()
    assert page.evaluate("window.harmed") is None
    assert page.locator("img").count() == 0 and page.locator("[onmouseover]").count() == 0
    assert "</script><img src=x" in page.locator("[data-table=modules]").inner_text()
    assert page.evaluate(SIDEWAYS) <= 0


def test_every_control_has_a_name_and_a_place_in_the_order(opened: Open) -> None:
    page = opened("plan")
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, canvas, svg[role=img], [tabindex]")]
            .filter(one => !(one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length))
            .map(one => one.outerHTML.slice(0, 200))"""
    )
    assert unnamed == []
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the answer"


def test_numbers_are_written_as_on_the_terminal(browser: Browser) -> None:
    sizes = [0, 1, 1023, 1024, 1536, 1048575, 2**20, 5 * 2**30 + 12345, 2**40, 7 * 2**50]
    times = [0, 1e-9, 9.994e-6, 9.996e-6, 0.00123, 0.9994, 0.9996, 1, 59.94, 59.96, 61, 3599.6, 86400]
    amounts = [0, 0.000223, 0.7, 0.9949, 0.996, 1, 2.675, 1234.5, 12345678.9]
    page = browser.new_page()
    code = f"([sizes, times, amounts]) => {{ {asset('formats.js')}; return WRITTEN; }}"
    code = code.replace(
        "WRITTEN", "[sizes.map(formatBytes), times.map(formatSeconds), amounts.map(formatMoney)]"
    )
    written = page.evaluate(code, [sizes, times, amounts])
    page.close()
    assert written[:2] == [[format_bytes(size) for size in sizes], [format_seconds(time) for time in times]]
    assert written[2] == list(map(money, amounts))


def test_without_scripts_the_answer_is_there(browser: Browser, pages: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((pages / "estimate.html").as_uri())
    assert "Fits" in page.locator("h1").inner_text()
    assert page.locator("svg.tf-picture").count() == 1
    assert "none runs here" in page.locator("noscript").inner_text()
    context.close()
