"""How long files and functions may be, that a name means one thing, and that every list of files is complete.

CONTRIBUTING.md says the rules.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "trainfit"
FILE_LINES = 350
FUNCTION_LINES = 60

MODEL_PARTS = {"Block", "SelfAttention"}
"""What every transformer has: in `models/`, each family has its own, and they mean the same."""


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


SOURCES = {name_of(file): file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py"))}
PACKAGES = sorted(name.removesuffix("/__init__.py") for name in SOURCES if name.endswith("/__init__.py"))


def functions_in(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def line_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function with its signature and docstring, without decorators."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_files_are_short() -> None:
    long = {name for name, text in SOURCES.items() if len(text.splitlines()) > FILE_LINES}
    assert not long, f"more than {FILE_LINES} lines"


def test_functions_are_short() -> None:
    long = {
        f"{file.relative_to(ROOT).as_posix()}: {function.name}"
        for folder in ("src", "tests", "benchmarks", "examples")
        for file in (ROOT / folder).rglob("*.py")
        for function in functions_in(file)
        if line_count(function) > FUNCTION_LINES
    }
    assert not long, f"more than {FUNCTION_LINES} lines"


def test_no_file_name_occurs_twice() -> None:
    counts = Counter(name.split("/")[-1] for name in SOURCES)
    twice = {name for name, count in counts.items() if count > 1} - {"__init__.py", "__main__.py"}
    assert not twice, "names of several files"


def test_no_class_name_occurs_twice() -> None:
    counts = Counter(
        node.name
        for name, text in SOURCES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and not (name.startswith("models/") and node.name in MODEL_PARTS)
    )
    twice = {name for name, count in counts.items() if count > 1}
    assert not twice, "names of several classes"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_lists_its_files(package: str) -> None:
    """Every file and folder of a package is in its docstring: in backticks, or first in a line of a list."""
    text = ast.get_docstring(ast.parse(SOURCES[f"{package}/__init__.py"])) or ""
    rows = re.findall(r"^([\w./]+)  ", text, re.MULTILINE)
    words = re.findall(r"`([\w./]+)`", text) + rows
    listed = {word.removesuffix(".py").strip("/") for word in words}
    folder = PACKAGE / package
    inside = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    inside |= {file.parent.name for file in folder.glob("*/__init__.py")}
    missing = sorted(inside - listed)
    assert not missing, "not in the docstring: " + ", ".join(missing)
    named = [
        *re.findall(r"`([\w/]+\.py)`", text),
        *(f"{row.strip('/').removesuffix('.py')}.py" for row in rows),
    ]
    gone = [
        name
        for name in named
        if not any((at / name).exists() or (at / name).with_suffix("").is_dir() for at in (folder, PACKAGE))
    ]
    assert not gone, "in the docstring, but not in the folder: " + ", ".join(gone)


def test_architecture_names_only_files_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    paths = re.findall(r"`([\w./]+(?:/|\.py|\.json|\.md))`", text)
    gone = [path for path in paths if not any((place / path).exists() for place in places_of(path, paths))]
    assert not gone, ", ".join(gone)


def places_of(path: str, paths: list[str]) -> list[Path]:
    """Return where a path of ARCHITECTURE.md may be: `text_plans.py` after `report/...` is in `report/`."""
    before = paths[: paths.index(path)]
    folders = [PACKAGE / earlier.rpartition("/")[0] for earlier in before if "/" in earlier]
    return [ROOT, PACKAGE, PACKAGE.parent, ROOT / "tests", *folders[-1:]]
