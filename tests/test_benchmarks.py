"""Benchmarks without running them: what they import exists, their rows are explained, the page is short."""

from __future__ import annotations

import ast
import csv
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"
SCRIPTS = sorted(FOLDER.rglob("*.py"))
PAGE_LINES = 190

sys.path.insert(0, str(FOLDER))
import result_files  # noqa: E402

sys.path.remove(str(FOLDER))


def own_imports(script: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import of trainfit, those inside functions too."""
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "trainfit":
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, "") for a in node.names if a.name.split(".")[0] == "trainfit")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_what_a_benchmark_imports_exists(script: Path) -> None:
    for module, name in own_imports(script):
        found = importlib.import_module(module)
        if name and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize("file", sorted(result_files.RESULTS.glob("*.csv")), ids=lambda path: path.name)
def test_the_columns_of_a_result_are_explained(file: Path) -> None:
    with file.open(encoding="utf-8", newline="") as opened:
        reader = csv.reader(opened)
        head = next(reader)
        rows = list(reader)
    assert head == [*result_files.TABLES[file.stem], *result_files.RUN]
    assert rows and all(len(row) == len(head) for row in rows)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", row[-2]) and "torch " in row[-1] for row in rows)


def test_every_table_is_written_by_a_script() -> None:
    texts = "".join(script.read_text(encoding="utf-8") for script in FOLDER.glob("*.py"))
    for table in result_files.TABLES:
        assert re.search(rf'(write_rows\(|table = .*)"{table}"', texts), table


@dataclass(frozen=True)
class Row:
    """A row with two of the columns of `order_speed`."""

    shape: str
    torch_seconds: float


def test_rows_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    result_files.write_rows("order_speed", [Row("wide", float("nan")), {"shape": "a, b", "nodes": 3}], path)
    written = path.read_text(encoding="utf-8")
    with path.open(encoding="utf-8", newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert [row["shape"] for row in rows] == ["wide", "a, b"]
    assert [row["torch_seconds"] for row in rows] == ["", ""] and rows[1]["nodes"] == "3"
    assert "python 3." in rows[0]["versions"]
    with pytest.raises(ValueError, match="unexplained"):
        result_files.write_rows("order_speed", [Row("wide", 1.0), {"unexplained": 1}], path)
    assert path.read_text(encoding="utf-8") == written
    assert [file.name for file in path.parent.iterdir()] == ["rows.csv"]


def test_a_run_of_some_cases_does_not_replace_the_rows_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_files, "RESULTS", tmp_path)
    assert result_files.write_rows("order_speed", [], everything=False) is None
    assert result_files.write_rows("order_speed", []) == tmp_path / "order_speed.csv"


def test_the_page_is_short_and_its_commands_exist() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= PAGE_LINES
    commands = re.findall(r"`(python (?:benchmarks|tests)/[^`]*)`", text)
    assert len(commands) >= 12
    for command in commands:
        _, script, *words = shlex.split(command)
        path = ROOT / script
        assert path.exists(), command
        sources = [path] if path.is_file() else [*path.glob("*.py")]
        known = "".join(source.read_text(encoding="utf-8") for source in sources)
        assert all(f'"{word}"' in known for word in words if word.startswith("--")), command


def test_every_script_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    scripts = {file.name for file in FOLDER.glob("*.py") if "def main(" in file.read_text(encoding="utf-8")}
    assert not {name for name in scripts if f"benchmarks/{name}" not in text}
