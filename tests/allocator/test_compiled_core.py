"""The compiled core and plain Python are one source; which of them runs, and that they agree."""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import trainfit.allocator
from trainfit.allocator import fast_core
from trainfit.allocator.core_source import MODULES, joined_source, source_digest

FOLDER = Path(trainfit.allocator.__file__).parent

PRINT = """
import json, random
from dataclasses import asdict
from trainfit.allocator import AllocationSequence, AllocatorOptions, replay
from trainfit.allocator.fast_core import COMPILED
draw, sequence, alive = random.Random(5), AllocationSequence(), []
for number in range(3000):
    if alive and draw.random() < 0.45:
        sequence.free(alive.pop(draw.randrange(len(alive))))
    else:
        sequence.allocate(number, int(2 ** draw.uniform(8, 25)), draw.randrange(2))
        alive.append(number)
        if draw.random() < 0.1:
            sequence.record_stream(number, 2)
found = [COMPILED]
for expandable in (False, True):
    options = AllocatorOptions(expandable_segments=expandable)
    result = replay(sequence, options, 900 << 20, keep_going=True, keep_placements=True)
    found += [asdict(result.statistics), result.placements]
print(json.dumps(found))
"""


def answer(core: str) -> list[object]:
    environment = {**os.environ, "TRAINFIT_ALLOCATOR_CORE": core, "PYTHONPATH": str(FOLDER.parent.parent)}
    command = [sys.executable, "-c", PRINT]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    found: list[object] = json.loads(result.stdout)
    return found


def is_up_to_date() -> bool:
    """Whether there is a compiled core that was made of these files."""
    try:
        compiled = importlib.import_module("trainfit.allocator.compiled_core")
    except ImportError:
        return False
    return bool(source_digest(FOLDER) == compiled.SOURCE_DIGEST)


def test_plain_python_can_be_chosen_and_says_the_same() -> None:
    plain, usual = answer("python"), answer("")
    assert plain[0] is False
    assert usual[0] is is_up_to_date()
    assert plain[1:] == usual[1:]


def test_a_core_that_was_compiled_of_other_files_is_not_used(tmp_path: Path) -> None:
    before = source_digest(FOLDER)
    for module in MODULES:
        shutil.copy(FOLDER / f"{module}.py", tmp_path)
    assert source_digest(tmp_path) == before
    (tmp_path / "releasing.py").write_text("# changed\n", encoding="utf-8")
    assert source_digest(tmp_path) != before


def test_the_joined_source_runs_on_its_own() -> None:
    source = joined_source(FOLDER)
    assert "trainfit." not in source.replace("`trainfit.", "")
    names: dict[str, object] = {"__name__": "joined"}
    exec(compile(source, "joined", "exec"), names)
    assert names["SOURCE_DIGEST"] == source_digest(FOLDER)
    missing = [name for name in fast_core.__all__ if name not in names and name != "COMPILED"]
    assert not missing


def test_no_name_is_in_two_of_the_joined_files() -> None:
    """One would replace the other."""
    seen: dict[str, str] = {}
    for module in MODULES:
        for node in ast.parse((FOLDER / f"{module}.py").read_text(encoding="utf-8")).body:
            names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            if isinstance(node, ast.Assign):
                names = [
                    name.id
                    for target in node.targets
                    for name in ast.walk(target)
                    if isinstance(name, ast.Name)
                ]
            for name in names:
                assert name not in seen, f"{name} is in {module} and in {seen[name]}"
                seen[name] = module
