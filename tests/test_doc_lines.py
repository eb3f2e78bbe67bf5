"""The `trainfit` lines of the documentation: their flags exist, they run, and print what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trainfit
from doc_pages import PAGES, ROOT, blocks
from trainfit.cli import commands as cli
from trainfit.order_fronts.eager import trace_graph
from trainfit.plans.ways import BIT_EQUAL, ChangeMade, Way


def command_lines() -> list[str]:
    """Every `trainfit ...` line in the shell blocks of the documentation, once."""
    return list(dict.fromkeys(line for page in PAGES for line in lines_of(page, "(?:console|bash)")))


def lines_of(page: Path, language: str) -> list[str]:
    lines = [line for block in blocks(page, language) for line in block.splitlines()]
    words = [line.removeprefix("$ ").split("  #")[0].strip() for line in lines]
    return [line for line in words if line.startswith("trainfit ")]


SHOWN = {
    line: output
    for page in PAGES
    for block in blocks(page, "console")
    for line, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
}
"""Command lines of the documentation that are shown with what they print."""
MINUTES = (
    *("405b", "70b", "--costs measured", "calibrate", "--solver modules"),
    *("frontier gpt2 --batch 20", "--points 8", "--mesh dp=4,tp=2", "-o way.json"),
    "verify gpt2-tiny --seq 64 --compile",
)
"""What takes long here, or nearly the same as another line: these run with `scripts/test --slow`."""
NEEDS_A_GPU = "trainfit calibrate -o my-gpu.json"


@pytest.fixture(scope="session")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    needed = trainfit.estimate("gpt2-tiny", device="cpu").peak_bytes
    trainfit.save_plan(trainfit.plan("gpt2-tiny", device="cpu", budget=needed * 9 // 10), str(file))
    return file


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Two results of the step in the quick start, as their files."""
    folder = tmp_path_factory.mktemp("results")
    (folder / "train.py").write_text(blocks(ROOT / "docs" / "quick-start.md", "python")[0])
    for name, batch in (("old.json", "72"), ("new.json", "64")):
        words = ["estimate", f"{folder}/train.py:build", "--device", "h100", "--batch", batch]
        assert CliRunner().invoke(cli.app, [*words, "--json", str(folder / name)]).exit_code == 0
    return {name: (folder / name).read_bytes() for name in ("old.json", "new.json")}


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A folder with the files that lines of the documentation name."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "train.py").write_text(blocks(ROOT / "docs" / "quick-start.md", "python")[0])
    (tmp_path / "prices.toml").write_text(blocks(ROOT / "docs" / "compare.md", "toml")[0])
    (tmp_path / "grid.toml").write_text(blocks(ROOT / "docs" / "sweep.md", "toml")[0])
    trainfit.save_device(trainfit.find_device("a10"), str(tmp_path / "my-gpu.json"))
    if "graph.json" in request.getfixturevalue("line"):
        trace = trainfit.capture("gpt2-tiny", device="cpu", options=trainfit.StepOptions(batch=1, seq=16))
        trainfit.save_graph(trace_graph(trace), str(tmp_path / "graph.json"))
    if " diff " in request.getfixturevalue("line"):
        for name, content in request.getfixturevalue("results").items():
            (tmp_path / name).write_bytes(content)
    if "--plan" in request.getfixturevalue("line"):
        (tmp_path / "plan.json").write_bytes(request.getfixturevalue("plan_file").read_bytes())
    if "--way" in request.getfixturevalue("line"):
        change = ChangeMade("state", "on the host", "", BIT_EQUAL, by_apply=True)
        way = Way("gpt2-tiny", "cpu", (change,), None, 0, 0, 1.0, None, None)
        trainfit.save_way(way, tmp_path / "way.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.slow if any(word in line for word in MINUTES) else ())
        for line in command_lines()
    ],
)
def test_a_line_of_the_documentation_runs(line: str, workshop: Path) -> None:
    if line == NEEDS_A_GPU:
        pytest.skip("measures the GPU of this machine")
    words = shlex.split(line)[1:]
    result = CliRunner().invoke(cli.app, words, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() or "-o" in words
    if line in SHOWN:
        assert result.stdout == SHOWN[line], "what the page shows is not what the command prints"


def test_what_pages_show_is_compared() -> None:
    assert len(SHOWN) >= 5 and all(SHOWN.values())


@pytest.mark.parametrize("line", command_lines())
def test_flags_in_the_documentation_exist(line: str) -> None:
    words = shlex.split(line)[1:]
    flags = [word for word in words if word.startswith("-") and word != "-"]
    # Not in the name of a command: the help of the command lists every flag it has.
    command = [word for word in words[:1] if not word.startswith("-")]
    help_text = CliRunner().invoke(cli.app, [*command, "--help"], env={"COLUMNS": "200"}).output
    assert "Usage" in help_text
    for flag in flags:
        assert flag in help_text, f"{flag} in: {line}"
