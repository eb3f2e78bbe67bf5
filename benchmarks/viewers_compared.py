"""The same training step in four viewers: what each page answers, how large it is, what it takes to make.

    pip install memray playwright
    python benchmarks/viewers_compared.py --pages build/viewers

- trainfit: `estimate --report`, for a GPU that is not there.
- memray: the step really runs here, under `memray run`; then `memray flamegraph --no-web`.
- torch's memory_viz: a snapshot of the step (`estimate --snapshot`, for want of a GPU that records one),
  made into a page by `torch.cuda._memory_viz trace_plot`.
- accelerate: the figures of `accelerate estimate-memory`, by its own functions (the command asks a hub).

Pages are opened in Debian's chromium without network, and what they show is kept as pictures in the folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from result_files import arguments

TARGET = ["gpt2", "--batch", "1", "--seq", "256", "--optimizer", "adamw-for-loop"]
REAL_STEP = """
import torch
from trainfit.models.recipe import StepOptions
from trainfit.targets.parse import load
torch.manual_seed(0)
step = load("gpt2", StepOptions(batch=1, seq=256, optimizer="adamw-for-loop")).build()
for _ in range(2):
    step.run()
"""


def main() -> int:
    """Make the pages, open them, and print a line for each."""
    parser = arguments(__doc__)
    parser.add_argument("--pages", default="build/viewers", help="the folder for pages and pictures")
    folder = Path(parser.parse_args().pages)
    folder.mkdir(parents=True, exist_ok=True)
    made = {
        "trainfit": trainfit_page(folder),
        "memory_viz": memory_viz_page(folder),
        "memray": memray_page(folder),
    }
    shown = pictures(folder, list(made))
    for name, seconds in made.items():
        size = (folder / f"{name}.html").stat().st_size
        errors, words = shown[name]
        print(
            f"{name:11} made in {seconds:6.1f} s, {size / 1e6:5.2f} MB, {errors} failed requests or errors "
            f"without network; text: {' '.join(words.split())[:160]!r}"
        )
    print(accelerate_figures())
    return 0


def _timed(*command: str, path: str = "") -> float:
    begin = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (path, *sys.path)))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed: {done.stderr[-2000:]}")
    return time.perf_counter() - begin


def trainfit_page(folder: Path) -> float:
    page, snapshot = str(folder / "trainfit.html"), str(folder / "step.pickle")
    outputs = ["--device", "a100-40gb", "--report", page, "--snapshot", snapshot, "-q"]
    return _timed(sys.executable, "-m", "trainfit", "estimate", *TARGET, *outputs)


def memory_viz_page(folder: Path) -> float:
    page, snapshot = str(folder / "memory_viz.html"), str(folder / "step.pickle")
    return _timed(sys.executable, "-m", "torch.cuda._memory_viz", "trace_plot", snapshot, "-o", page)


def memray_page(folder: Path) -> float:
    script, record = folder / "real_step.py", folder / "step.bin"
    script.write_text(REAL_STEP, encoding="utf-8")
    seconds = _timed(sys.executable, "-m", "memray", "run", "-f", "-o", str(record), str(script))
    page = str(folder / "memray.html")
    return seconds + _timed(
        sys.executable, "-m", "memray", "flamegraph", "--no-web", "-f", "-o", page, str(record)
    )


def pictures(folder: Path, names: list[str]) -> dict[str, tuple[int, str]]:
    """Open the pages without network; keep what they show; count what went wrong."""
    from playwright.sync_api import sync_playwright

    found: dict[str, tuple[int, str]] = {}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for name in names:
            context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
            page = context.new_page()
            wrong: list[str] = []
            page.on("requestfailed", lambda request, wrong=wrong: wrong.append(request.url))
            page.on("pageerror", lambda error, wrong=wrong: wrong.append(str(error)))
            page.goto((folder / f"{name}.html").resolve().as_uri())
            page.wait_for_timeout(2000)
            page.screenshot(path=str(folder / f"{name}.png"))
            found[name] = (len(wrong), page.inner_text("body"))
            context.close()
        browser.close()
    return found


def accelerate_figures() -> str:
    """Return what `accelerate estimate-memory` says about the model, by its own formulas."""
    sys.modules.setdefault("timm", None)  # type: ignore[arg-type]  # it is used if it is there, and not needed
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoModelForCausalLM, GPT2Config

    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(GPT2Config())
    total, largest = calculate_maximum_sizes(model)
    usage = {name: round(size / 2**20) for name, size in estimate_training_usage(total, "float32").items()}
    whole = f"largest layer {largest[0] / 2**20:.0f} MiB, total {total / 2**20:.0f} MiB"
    return f"accelerate  {whole}, training {usage} MiB"


if __name__ == "__main__":
    sys.exit(main())
