"""`sweep` in real processes: its figures, workers that are killed, and what a second run continues."""

from __future__ import annotations

import csv
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import trainfit
from trainfit.cli import commands as cli

STEP = """
import os, signal, time
import torch, trainfit

def build(batch: int = 1, mode: str = "fine"):
    with open("calls.txt", "a") as calls:
        calls.write(f"{mode} {batch} {os.getpid()}\\n")
    print("what nobody shall read")
    input_is_empty = os.read(0, 1) == b""
    assert input_is_empty
    if mode == "dies" or mode == "dies once" and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "wrong":
        raise ValueError("the user's own mistake")
    if mode == "slow":
        time.sleep(0.5 if batch < 3 else 600)
    model = torch.nn.Linear(8, 8)
    return trainfit.Step.of(model, torch.randn(batch, 8), loss=lambda y: y.mean())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.py").write_text(STEP)
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words))


def calls() -> list[str]:
    file = Path("calls.txt")
    return [line.rpartition(" ")[0] for line in file.read_text().splitlines()] if file.exists() else []


def test_figures_are_those_of_estimate_and_plan() -> None:
    budgets = ["none", "180MiB", "1MiB"]
    found = trainfit.sweep(
        {"target": "gpt2-tiny", "batch": 8, "device": "a100-40gb", "budget": budgets}, jobs=1
    )
    assert [row["budget"] for row in found.rows] == budgets
    for row in found.rows:
        options = trainfit.StepOptions(batch=row["batch"])
        alone = trainfit.estimate("gpt2-tiny", device="a100-40gb", options=options)
        assert row["error"] is None and row["seq"] == 256 and row["device_name"] == "a100-sxm-40gb"
        if row["budget"] == "none":
            assert row["fits"] and row["peak_bytes"] == alone.peak_bytes
            assert row["step_seconds"] == alone.time.step_seconds
            assert row["tokens_per_second"] == pytest.approx(row["batch"] * 256 / row["step_seconds"])
            assert row["activation_bytes"] == alone.by_category["activation"]
        elif row["budget"] == "1MiB":
            assert (row["fits"], row["step_seconds"]) == (False, None)
            assert row["smallest_memory_bytes"] > 2**20
        else:
            planned = trainfit.plan("gpt2-tiny", budget="180MiB", device="a100-40gb", options=options)
            assert row["smallest_memory_bytes"] == planned.memory_bytes <= 180 * 2**20
            assert row["step_seconds"] == pytest.approx(planned.step_seconds)
            assert row["plan_regions"] == len(planned.regions)
            assert row["unplanned_peak_bytes"] == alone.peak_bytes
    assert "3 rows, 2 fit" in str(found) and repr(found) == "<Sweep of grid: 3 rows, 0 failed>"


def test_deaths_and_mistakes_do_not_stop_the_others() -> None:
    modes = ["fine", "dies", "dies once", "wrong"]
    grid = {"target": "step.py:build", "device": "h100", "set": {"mode": modes}}
    found = trainfit.sweep(grid, output="table.csv", jobs=2)
    errors = {row["set.mode"]: row["error"] for row in found.rows}
    assert errors["fine"] is None and errors["dies once"] is None
    assert errors["dies"].startswith(
        "3 workers died over this row, the last one because it was ended by SIGKILL"
    )
    assert errors["wrong"] == "build() in step.py raised ValueError: the user's own mistake"
    assert calls().count("dies 1") == 3
    with open("table.csv", newline="") as file:
        table = {row["set.mode"]: row for row in csv.DictReader(file)}
    assert table["wrong"]["error"] == errors["wrong"] and table["wrong"]["peak_bytes"] == ""
    same = [row for row in found.rows if row["error"] is None]
    assert same[0]["peak_bytes"] == same[1]["peak_bytes"] == int(table["fine"]["peak_bytes"])
    # A second run does again only what failed.
    before = calls()
    again = trainfit.sweep(grid, output="table.csv", jobs=1)
    assert again.data.kept == 2
    assert set(calls()[len(before) :]) == {"dies 1", "wrong 1"}


def test_a_second_run_continues_and_a_changed_step_begins_anew(folder: Path) -> None:
    Path("grid.toml").write_text('target = "step.py:build"\nbatch = [1, 2]\ndevice = "h100"\n')
    assert run("sweep", "grid.toml", "--jobs", "1").exit_code == 0
    first, once = Path("grid.csv").read_bytes(), len(calls())
    assert once >= 2
    done = run("sweep", "grid.toml", "--jobs", "1", "--json", "result.json")
    assert done.exit_code == 0 and "2 of them from before" in done.output
    assert len(calls()) == once and Path("grid.csv").read_bytes() == first
    result = json.loads(Path("result.json").read_text())
    assert (result["kept"], result["failed"], result["varied"]) == (2, 0, ["batch"])
    assert [row["batch"] for row in result["results"]] == [1, 2]
    # One more value of an axis: only its row is done.
    Path("grid.toml").write_text('target = "step.py:build"\nbatch = [1, 2, 4]\ndevice = "h100"\n')
    assert "2 of them from before" in run("sweep", "grid.toml", "--jobs", "1").output
    assert {*calls()[once:]} == {"fine 4"}
    (folder / "step.py").write_text(STEP + "\n# changed\n")
    assert "from before" not in run("sweep", "grid.toml", "--jobs", "1").output
    assert "from before" not in run("sweep", "grid.toml", "--jobs", "1", "--fresh").output


@pytest.fixture
def started() -> Iterator[subprocess.Popen[str]]:
    """A sweep of which two rows are quick and the third takes ten minutes."""
    Path("grid.toml").write_text(
        'target = "step.py:build"\nbatch = [1, 2, 3]\ndevice = "h100"\n[set]\nmode = "slow"\n'
    )
    command = [sys.executable, "-m", "trainfit", "sweep", "grid.toml", "--jobs", "1"]
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # whoever runs the tests may not
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, preexec_fn=heard, **pipes)
    yield process
    process.kill()
    process.communicate()


def wait_for_row_three() -> int:
    """Return the worker that has begun with the third row."""
    for _ in range(1200):
        lines = Path("calls.txt").read_text().splitlines() if Path("calls.txt").exists() else []
        if lines and lines[-1].startswith("slow 3 "):
            return int(lines[-1].split()[-1])
        time.sleep(0.1)
    raise AssertionError("the third row never began")


def is_gone(process: int) -> bool:
    for _ in range(100):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_an_interrupt_keeps_what_is_done(started: subprocess.Popen[str]) -> None:
    worker = wait_for_row_three()
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=180)
    assert started.returncode == 130
    assert "2 of 3 rows are done and kept in grid.csv.state.jsonl" in err and "Traceback" not in err
    assert is_gone(worker) and not Path("grid.csv").exists()
    Path("grid.toml").write_text(
        'target = "step.py:build"\nbatch = [1, 2]\ndevice = "h100"\n[set]\nmode = "slow"\n'
    )
    done = run("sweep", "grid.toml", "--jobs", "1")
    assert done.exit_code == 0 and "2 of them from before" in done.output


def test_a_worker_that_is_killed_from_outside_loses_nothing(started: subprocess.Popen[str]) -> None:
    first = wait_for_row_three()
    os.kill(first, signal.SIGKILL)
    for _ in range(1200):
        second = wait_for_row_three()
        if second != first:
            break
        time.sleep(0.1)
    assert second != first and started.poll() is None
    os.kill(started.pid, signal.SIGKILL)  # now the sweep itself: what is done is there all the same
    started.communicate()
    assert is_gone(second)
    state = Path("grid.csv.state.jsonl").read_text().splitlines()
    assert len(state) == 3 and all(json.loads(line)["row"]["error"] is None for line in state[1:])


def test_files_of_several_folders_may_have_neighbours_of_one_name(folder: Path) -> None:
    for name, width in (("one", 4), ("two", 6)):
        (folder / name).mkdir()
        (folder / name / "parts.py").write_text(f"WIDTH = {width}\n")
        text = STEP.replace("Linear(8, 8)", "Linear(WIDTH, 1)").replace("(batch, 8)", "(batch, WIDTH)")
        (folder / name / "train.py").write_text("from parts import WIDTH\n" + text)
    targets = ["one/train.py:build", "two/train.py:build"]
    found = trainfit.sweep({"target": targets, "device": "h100"}, jobs=1)
    assert [row["parameters"] for row in found.rows] == [5, 7]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.toml"], "cannot be read: No such file"),
        (["grid.toml", "--jobs", "0"], "--jobs must be a whole number from 1"),
        (["grid.toml", "-o", "table.txt"], "ends in .csv or .parquet"),
        (["grid.toml", "-o", "nowhere/table.csv"], "there is no folder 'nowhere'"),
        (["grid.toml", "-o", "-"], "only --json can be written to standard output"),
        (["bad.toml"], "bad.toml: batch: --batch must be a whole number"),
    ],
)
def test_mistakes_are_one_message(words: list[str], said: str) -> None:
    Path("grid.toml").write_text('target = "gpt2-tiny"\ndevice = "h100"\n')
    Path("bad.toml").write_text('target = "gpt2-tiny"\ndevice = "h100"\nbatch = "many"\n')
    done = run("sweep", *words)
    assert done.exit_code == 2 and said in " ".join(done.stderr.split())
    assert not list(Path().glob("*.jsonl"))


def test_a_grid_in_which_everything_fails_has_exit_code_two() -> None:
    Path("grid.toml").write_text('target = "step.py:build"\ndevice = "h100"\nset = {mode = "wrong"}\n')
    done = run("sweep", "grid.toml", "--jobs", "1")
    assert done.exit_code == 2 and "all 1 rows failed" in done.stderr
    assert "the user's own mistake" in Path("grid.csv").read_text()


def test_a_table_as_parquet() -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    grid = {"target": ["gpt2-tiny", "step.py:none"], "device": "h100", "budget": ["none", 10**9]}
    found = trainfit.sweep(grid, output="table.parquet", jobs=1)
    table = parquet.read_table("table.parquet").to_pylist()
    assert [row["peak_bytes"] for row in table] == [row["peak_bytes"] for row in found.rows]
    assert [row["budget"] for row in table] == ["none", "1000000000"] * 2  # a column has one type
    assert table[2]["error"] == found.rows[2]["error"] and table[0]["fits"] is True


@pytest.mark.skipif("pyarrow" in sys.modules, reason="pyarrow is there")
def test_parquet_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(trainfit.MissingExtra, match=r"trainfit\[parquet\]"):
        trainfit.sweep({"target": "gpt2-tiny", "device": "h100"}, output="table.parquet")


def test_ray_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(trainfit.MissingExtra, match=r"trainfit\[ray\]"):
        trainfit.sweep({"target": "gpt2-tiny", "device": "h100"}, output="table.csv", ray=True)
    assert not list(Path().glob("*.jsonl"))
