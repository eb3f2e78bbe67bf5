"""The HTML report of a large model in a real browser: size, time to write, first paint, frames while zooming.

    pip install playwright plotly
    python benchmarks/report_speed.py [--target llama-3-8b] [--optimizer adamw-for-loop] [--rounds 3]

The page is written as `--report` writes it. Debian's chromium opens it and records its own trace while the
mouse wheel zooms into the memory picture and out again. Frames are those that chromium says it has drawn; the
time between two of them, and that of the longest task, is wall-clock time, and long where the machine has
other work to do. What the page itself takes is the processor time of its longest task, and the bound is on
that. The same memory, as stacked areas of plotly, is zoomed in the same way in the same run; plotly draws as
its users get it, with SVG; where it is not installed, only this page is measured. Exit code 1 if a bound is
missed.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import trainfit
from result_files import arguments, write_rows
from trainfit.report.reading import estimate_data
from trainfit.traces.trace import CATEGORIES
from trainfit.webpage.page import write_page

BOUND_BYTES = 6e6
BOUND_WRITE_SECONDS = 2.0
BOUND_PAINT_SECONDS = 1.0
BOUND_FRAME_SECONDS = 0.1
TURNS = 60
"""Turns of the wheel in one direction."""
TRACED = [
    *("devtools.timeline", "disabled-by-default-devtools.timeline", "toplevel"),
    "disabled-by-default-devtools.timeline.frame",
]
READY = {"trainfit": "html[data-ready]", "plotly": ".plotly .scatterlayer path"}
PICTURE = {"trainfit": "canvas.tf-memory", "plotly": ".plotly .nsewdrag"}


def main() -> int:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--target", default="llama-3-8b")
    parser.add_argument("--optimizer", default="adamw-for-loop")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    asked = trainfit.StepOptions(optimizer=given.optimizer)
    estimate = trainfit.estimate(given.target, device="h100", options=asked)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        pages = {"trainfit": Path(folder) / "trainfit.html"}
        if has_plotly := find_spec("plotly") is not None:
            pages["plotly"] = Path(folder) / "plotly.html"
        else:
            print("plotly is not installed: this page alone, nothing beside it", flush=True)
        for number in range(given.rounds):
            for way, page in pages.items():
                begin = time.perf_counter()
                if way == "trainfit":
                    write_page(estimate_data(estimate), estimate, page)
                else:
                    write_plotly(estimate, page)
                written = time.perf_counter() - begin
                row: dict[str, Any] = {
                    "way": way,
                    "round": number,
                    "ops": len(estimate.trace.ops),
                    "write_seconds": written,
                }
                row["load"] = os.getloadavg()[0]
                rows.append({**row, "bytes": page.stat().st_size, **looked_at(way, page)})
                print("  ".join(f"{name} {_shown(value)}" for name, value in rows[-1].items()), flush=True)
    everything = has_plotly and given.target == "llama-3-8b" and given.optimizer == "adamw-for-loop"
    write_rows("report_speed", rows, given.csv, everything=everything)
    return verdict([row for row in rows if row["way"] == "trainfit"])


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def write_plotly(estimate: trainfit.Estimate, page: Path) -> None:
    """Write the same memory as stacked areas, as one would with plotly."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for name, values in zip(CATEGORIES, estimate.timeline.by_category):
        figure.add_scatter(
            y=values.tolist(), name=name, stackgroup="memory", line={"width": 0, "shape": "hv"}
        )
    figure.update_layout(width=1200, height=500)
    figure.write_html(page, include_plotlyjs=True, config={"scrollZoom": True})


def looked_at(way: str, file: Path) -> dict[str, float | None]:
    """Open a page, zoom into its memory picture and out again, and return what chromium's trace says."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(file.as_uri())
        page.wait_for_selector(READY[way], state="attached", timeout=60_000)
        page.wait_for_timeout(500)
        paints = page.evaluate("performance.getEntriesByType('paint').map(one => [one.name, one.startTime])")
        canvas = page.locator(PICTURE[way])
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 0.5 * box["height"])
        page.mouse.down()
        page.mouse.up()
        page.wait_for_timeout(500)
        browser.start_tracing(page=page, categories=TRACED)
        for direction in (-1, 1):
            for _ in range(TURNS):
                page.mouse.wheel(0, direction * 60)
        page.wait_for_timeout(300)
        events = json.loads(browser.stop_tracing())["traceEvents"]
        browser.close()
    return {"first_paint_seconds": dict(paints)["first-contentful-paint"] / 1e3, **frames(events)}


def frames(events: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the time between frames that were drawn, and the longest task of the page's main thread.

    Only between turns of the wheel: afterwards nothing changes, and nothing is drawn.
    """
    threads = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("args", {}).get("name") == "CrRendererMain"
    }
    wheels = [
        e["ts"] for e in events if e["name"] == "EventDispatch" and e["args"]["data"]["type"] == "wheel"
    ]
    first, last = min(wheels), max(wheels)
    pages = {pid for pid, _ in threads}
    drawn = sorted(
        event["ts"]
        for event in events
        if event["name"] == "DrawFrame" and event["pid"] in pages and first <= event["ts"] <= last
    )
    between = [(after - before) / 1e6 for before, after in pairwise(drawn)]
    tasks = [
        event
        for event in events
        if event["name"] == "RunTask" and (event["pid"], event["tid"]) in threads and _end(event) >= first
    ]
    return {
        "frames": len(drawn),
        "median_frame_seconds": statistics.median(between) if between else None,
        "longest_frame_seconds": max(between, default=None),
        "longest_task_seconds": max((task.get("dur", 0) / 1e6 for task in tasks), default=None),
        "longest_task_processor_seconds": max((task.get("tdur", 0) / 1e6 for task in tasks), default=None),
    }


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event.get("dur", 0))


def verdict(rows: list[dict[str, Any]]) -> int:
    """Say whether every bound is kept in every round."""
    bounds = {
        "bytes": BOUND_BYTES,
        "write_seconds": BOUND_WRITE_SECONDS,
        "first_paint_seconds": BOUND_PAINT_SECONDS,
        "longest_task_processor_seconds": BOUND_FRAME_SECONDS,
    }
    missed = [
        name for name, bound in bounds.items() for row in rows if row[name] is None or row[name] > bound
    ]
    for name, bound in bounds.items():
        print(f"{name}: most {_shown(max(row[name] or 0 for row in rows))}, bound {bound:g}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
