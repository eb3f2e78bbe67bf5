"""Documentation that is executed: the Python in README and docs, the shell lines, and every example."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from typer.testing import CliRunner

import trainfit
from trainfit.cli import commands as cli
from trainfit.order_fronts.eager import trace_graph

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
TRAININGS = {
    "train_with_plan.py": "the losses are the same",
    "hf_trainer.py": "losses and trained weights are the same, bit by bit",
}
"""Examples that train with a plan, and what they find."""
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {ROOT / "examples" / name for name in TRAININGS})


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


PYTHON_BLOCKS = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(blocks(page, "python"))
]


@pytest.mark.parametrize("code", PYTHON_BLOCKS)
def test_python_in_the_documentation_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "documentation", "exec"), {"__name__": "documentation"})


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
MINUTES = ("405b", "70b", "--costs measured", "calibrate", "--solver modules", "frontier gpt2 --batch 20")
"""What takes long here: these lines run with `scripts/test --slow`."""
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
    trainfit.save_device(trainfit.find_device("a10"), str(tmp_path / "my-gpu.json"))
    if "graph.json" in request.getfixturevalue("line"):
        trace = trainfit.capture("gpt2-tiny", device="cpu", options=trainfit.StepOptions(batch=1, seq=16))
        trainfit.save_graph(trace_graph(trace), str(tmp_path / "graph.json"))
    if " diff " in request.getfixturevalue("line"):
        for name, content in request.getfixturevalue("results").items():
            (tmp_path / name).write_bytes(content)
    if "--plan" in request.getfixturevalue("line"):
        (tmp_path / "plan.json").write_bytes(request.getfixturevalue("plan_file").read_bytes())
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
    assert len(SHOWN) >= 6 and all(SHOWN.values())


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


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: ([\w.]+)$", page, re.MULTILINE)
    objects = [
        getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in named
    ]
    public = {name: getattr(trainfit, name) for name in trainfit.__all__ if name != "__version__"}
    assert [name for name, value in public.items() if not any(value is one for one in objects)] == []
    assert len(objects) == len(public)


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    named = re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE)
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(pages)


def test_every_command_has_its_page() -> None:
    commands = {command.callback.__name__ for command in cli.app.registered_commands}
    assert commands <= {page.stem for page in (ROOT / "docs").glob("*.md")}


def test_links_in_the_documentation_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            file, _, heading = link.partition("#")
            target = page.parent / file if file else page
            if "://" not in link and not (target.exists() and (not heading or heading in headings(target))):
                broken.append(f"{page.name}: {link}")
    assert not broken, "\n".join(broken)


def headings(page: Path) -> set[str]:
    """Return the headings of a page as links name them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line).lower().replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_tables_and_lists_are_whole(page: Path) -> None:
    """A line of a table or list that a renderer takes for text, or a row with another number of cells."""
    text = page.read_text(encoding="utf-8")
    lines = text.splitlines()
    broken = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "inline":
            broken += [line for line in token.content.splitlines() if re.match(r"[|*+-] |[|]|\d+\. ", line)]
        elif token.type == "table_open":
            rows = [line for line in lines[slice(*token.map)] if line.strip()]
            cells = [len(re.findall(r"(?<!\\)\|", row)) for row in rows]
            broken += [row for row, count in zip(rows, cells) if count != cells[0]]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_for_real(example: Path) -> None:
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "loss of one real step" in done.stdout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "hf" in name else ()) for name in TRAININGS]
)
def test_an_example_trains_with_a_plan(name: str) -> None:
    if "hf" in name:
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    example = ROOT / "examples" / name
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert TRAININGS[name] in done.stdout


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_estimated(example: Path, device: str) -> None:
    functions = [name for name in ("build", "full") if name in runpy.run_path(str(example))]
    for name in functions:
        result = trainfit.estimate(f"{example}:{name}", device=device)
        assert result.fits and result.peak_bytes > result.timeline.persistent_bytes > 0


def test_the_config_example_is_estimated() -> None:
    pytest.importorskip("transformers")
    options = trainfit.StepOptions(batch=2, seq=64)
    result = trainfit.estimate(f"hf:{ROOT}/examples/qwen2-small.json", device="cpu", options=options)
    assert result.fits
