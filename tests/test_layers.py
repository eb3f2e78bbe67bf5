"""Imports point one way, and torch is imported only at the edges. The two tables below are the rule."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "trainfit"

# In the order in which data passes through them. A part imports from the parts above it. What is inside a
# folder is the folder's own business.
LAYERS = (
    "errors",
    "basics",
    "traces",
    "operators",
    "memory",
    "devices",
    "allocator",
    "plans",
    "ordering",
    "steps",
    "models",
    "targets",
    "workspace",
    "capturing",
    "changes",
    "applying",
    "comparing",
    "order_fronts",
    "timing",
    "costs",
    "planning",
    "compiling",
    "fitting",
    "sizing",
    "verifying",
    "calibrating",
    "api",
    "autoplanning",
    "lightning",
    "compat",
    "report",
    "webpage",
    "exports",
    "diffing",
    "renting",
    "sharding",
    "scaling",
    "sweeping",
    "cli",
    "__main__",
)

# Who may import what from elsewhere when the module is loaded, and who only inside a function.
THIRD_PARTIES = {
    "torch": (
        "steps models targets workspace capturing changes applying comparing order_fronts timing verifying "
        "calibrating api autoplanning compiling lightning compat",
        "devices costs cli",
    ),
    "numpy": (
        "traces memory allocator.step_columns costs fitting planning capturing comparing compat verifying "
        "webpage scaling compiling",
        "",
    ),
    "rich": ("report", ""),
    "typer": ("cli", ""),
    "transformers": ("autoplanning.trainer_callback", "targets"),
    "lightning": ("lightning", ""),
    "ray": ("", "sweeping.ray_crew"),
    "pyarrow": ("", "sweeping.swept_table"),
}

RANK = {part: rank for rank, part in enumerate(LAYERS)}


@dataclass(frozen=True)
class Import:
    """One import statement: who, whom, where, and whether it is executed when the module is loaded."""

    importer: str
    imported: str
    line: int
    on_load: bool
    for_types: bool

    @property
    def part(self) -> str:
        """The layer's part that imports: a top-level module or folder of the package."""
        return self.importer.split(".")[1]


def module_name(file: Path) -> str:
    parts = ["trainfit", *file.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def imports_of(name: str) -> list[Import]:
    found: list[Import] = []

    def visit(node: ast.AST, on_load: bool, for_types: bool) -> None:
        for child in ast.iter_child_nodes(node):
            in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            types_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            for imported in names_in(child):
                found.append(Import(name, imported, child.lineno, on_load and not for_types, for_types))
            visit(child, on_load and not in_function, for_types or types_only)

    visit(ast.parse(FILES[name].read_text(encoding="utf-8")), on_load=True, for_types=False)
    return found


def names_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in FILES else str(node.module)


def own_imports() -> Iterator[Import]:
    """Yield every import of one part of the package by another.

    The package's own `__init__` is the shop window: it shows everything, and everyone may ask its version.
    """
    for name in FILES:
        if name != "trainfit":
            yield from (i for i in imports_of(name) if i.imported.startswith("trainfit."))


def test_every_part_has_its_layer() -> None:
    parts = {name.split(".")[1] for name in FILES if name != "trainfit"}
    assert parts == set(RANK)


def test_architecture_has_the_parts_in_this_order() -> None:
    text = (PACKAGE.parent.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = text.split("| part | what it does |")[1].split("\n\n")[0]
    parts = [part for row in table.splitlines()[2:] for part in re.findall(r"`([\w]+)/?`", row.split("|")[1])]
    assert sorted(parts) == sorted(RANK)
    ranks = [RANK[part] for part in parts]
    wrong = [part for part, rank, before in zip(parts[1:], ranks[1:], ranks) if rank < before]
    assert not wrong, f"in the table of ARCHITECTURE.md above a part that is below it here: {wrong}"


def test_imports_point_one_way() -> None:
    wrong = [
        f"{i.importer}:{i.line} imports {i.imported}"
        for i in own_imports()
        if i.part != i.imported.split(".")[1] and RANK[i.part] < RANK[i.imported.split(".")[1]]
    ]
    assert not wrong, "\n".join(wrong)


def test_there_is_no_cycle_among_modules_that_load_each_other() -> None:
    graph = {name: [i.imported for i in imports_of(name) if i.on_load] for name in FILES}
    finished: set[str] = set()

    def follow(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in finished:
            for imported in graph[name]:
                # A folder's __init__ imports its modules, and they may import the folder's siblings.
                if imported in FILES and imported != "trainfit":
                    follow(imported, (*path, name))
            finished.add(name)

    for name in FILES:
        follow(name, ())


@pytest.mark.parametrize("library", THIRD_PARTIES)
def test_other_libraries_stay_where_they_belong(library: str) -> None:
    on_load, in_functions = (set(parts.split()) for parts in THIRD_PARTIES[library])
    wrong = []
    for name in FILES:
        for i in imports_of(name):
            if i.imported.split(".")[0] != library or i.for_types:
                continue
            allowed = on_load if i.on_load else on_load | in_functions
            if not {name, i.part, name.removeprefix("trainfit.")} & allowed:
                wrong.append(f"{name}:{i.line} imports {i.imported}")
    assert not wrong, "\n".join(wrong)


PARTS_WITHOUT_TORCH = (
    "errors basics traces operators memory devices allocator plans ordering planning sizing report webpage "
    "cli"
)
WITHOUT_TORCH = tuple(
    name for name in FILES if name == "trainfit" or name.split(".")[1] in PARTS_WITHOUT_TORCH.split()
)


def test_the_core_loads_without_torch() -> None:
    code = "import importlib, sys\n"
    code += f"for name in {WITHOUT_TORCH!r}:\n    importlib.import_module(name)\n"
    code += "assert 'torch' not in sys.modules\n"
    code += "import trainfit\n"
    code += (
        "assert trainfit.Trace and trainfit.Device and trainfit.StepError and trainfit.find_device('h100')\n"
    )
    code += "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_every_public_name_loads() -> None:
    import trainfit

    assert sorted(trainfit.__all__) == dir(trainfit)
    for name in trainfit.__all__:
        assert getattr(trainfit, name) is not None
    with pytest.raises(AttributeError, match="module 'trainfit' has no attribute 'nonsense'"):
        trainfit.nonsense  # noqa: B018


def test_no_module_hides_a_public_function() -> None:
    import trainfit

    modules = {name.split(".")[1] for name in FILES if name != "trainfit"}
    assert not modules & set(trainfit.__all__)


def test_versions_agree() -> None:
    import tomllib

    import trainfit

    project = tomllib.loads((PACKAGE.parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["version"] == trainfit.__version__
