"""Documentation that is executed: the Python in README and docs, and every example; and that it is whole."""

from __future__ import annotations

import importlib
import re
import runpy
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from markdown_it import MarkdownIt

import trainfit
from doc_pages import PAGES, ROOT, blocks
from trainfit.cli import commands as cli

TRAININGS = {
    "train_with_plan.py": "the losses are the same",
    "hf_trainer.py": "losses and trained weights are the same, bit by bit",
    "hf_trainer_autoplan.py": "losses and trained weights are the same, bit by bit",
}
"""Examples that train with a plan, and what they find."""
EXAMPLES = sorted(set((ROOT / "examples").glob("*.py")) - {ROOT / "examples" / name for name in TRAININGS})


PYTHON_BLOCKS = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(blocks(page, "python"))
]


@pytest.fixture
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize("code", PYTHON_BLOCKS)
def test_python_in_the_documentation_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "documentation"}
    try:
        exec(compile(code, "documentation", "exec"), names)
    except AssertionError as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)]
        line = code.splitlines()[(lines[-1] or 1) - 1]
        values = {name: names[name] for name in re.findall(r"\w+", line) if name in names}
        raise AssertionError(f"{line.strip()}, where {values}") from error


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
    commands = {command.callback.__name__.replace("_", "-") for command in cli.app.registered_commands}
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
