"""Results to make pages of, each made once, and one browser for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hostile_steps
import pytest
from opened_pages import CHROMIUM, Open

import trainfit
from trainfit.api import choose
from trainfit.api.arrange import order_anything
from trainfit.api.request import Request
from trainfit.diffing.what_grew import diff as what_grew
from trainfit.report import reading
from trainfit.webpage.page import write_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="session")
def gpt2() -> trainfit.Trace:
    return trainfit.capture("gpt2-tiny", device="a100-40gb")


@pytest.fixture(scope="session")
def estimated(gpt2: trainfit.Trace) -> trainfit.Estimate:
    return trainfit.estimate(gpt2, device="a100-40gb")


@pytest.fixture(scope="session")
def planned(gpt2: trainfit.Trace, estimated: trainfit.Estimate) -> Any:
    budget = f"{int(0.9 * estimated.smallest_memory_bytes)}B"
    return choose.plan_step(Request(gpt2, "a100-40gb"), budget)


@pytest.fixture(scope="session")
def hostile() -> trainfit.Estimate:
    return trainfit.estimate(hostile_steps.build, device="a100-40gb")


@pytest.fixture(scope="session")
def pages(
    estimated: trainfit.Estimate,
    planned: Any,
    hostile: trainfit.Estimate,
    gpt2: trainfit.Trace,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Return a folder with a page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    frontier = choose.frontier_step(Request(gpt2, "a100-40gb"), 4)
    order = order_anything(gpt2, graph="eager", options=None, task=None, seconds=None)
    write_page(reading.estimate_data(estimated), estimated, folder / "estimate.html")
    write_page(reading.plan_data(planned), planned, folder / "plan.html")
    write_page(reading.frontier_data(frontier), frontier, folder / "frontier.html")
    write_page(reading.order_data(order), order, folder / "order.html")
    write_page(reading.estimate_data(hostile), hostile, folder / "hostile.html")
    larger = trainfit.estimate("gpt2-tiny", device="a100-40gb", options=trainfit.StepOptions(batch=12))
    grown = what_grew(estimated, larger)
    write_page(grown.data, grown, folder / "diff.html")
    compared = trainfit.compare(gpt2, ["h100", "t4"], prices={"h100": 2.99, "t4": 0.35}, tokens="1B")
    compared.save_report(folder / "compare.html")
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium on this machine; scripts/test installs it where it may")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser: Browser, pages: Path) -> Iterator[Open]:
    """Open a page; whatever goes wrong in it, or is loaded from anywhere, fails the test."""
    wrong: list[str] = []
    contexts = []

    def open_page(name: str, width: int = 1280, height: int = 900, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: wrong.append(asked.url) if asked.url[:5] != "file:" else None)
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.goto((pages / f"{name}.html").as_uri())
        page.wait_for_selector("html[data-ready]", timeout=20_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong
