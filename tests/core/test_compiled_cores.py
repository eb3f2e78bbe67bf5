"""Compiled cores and plain Python are one source; which of them runs, and that they agree."""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trainfit
from trainfit.allocator import fast_core
from trainfit.basics.compiled_cores import ALLOCATOR, CORES, PARTITIONS, CompiledCore
from trainfit.compiling import fast_partitions

PACKAGE = Path(trainfit.__file__).parent
LOADERS = {ALLOCATOR: fast_core, PARTITIONS: fast_partitions}

REPLAYS = """
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
SEARCHES = """
import dataclasses, json, random, sys
sys.path.insert(0, "tests/compiling")
from test_partitions import chain, random_problem
from trainfit.compiling.fast_partitions import COMPILED
from trainfit.compiling.partition_search import PartitionSearch
from trainfit.compiling.recompute_problem import Fusing, Role
found = [COMPILED]
for seed in range(12):
    draw = random.Random(seed)
    problem = chain(30) if seed == 0 else random_problem(seed)
    if seed % 2:
        kinds = [draw.choice((Fusing.NOTHING, Fusing.POINTWISE, Fusing.REDUCTION)) for _ in problem.nodes]
        nodes = [
            dataclasses.replace(node, fusing=kind) if node.role in (Role.FORWARD, Role.BACKWARD) else node
            for node, kind in zip(problem.nodes, kinds)
        ]
        problem = dataclasses.replace(problem, nodes=tuple(nodes))
    search = PartitionSearch(problem)
    search.look_everywhere()
    found.append(
        [
            (p.kept, p.seconds, p.held_bytes, p.forward_peak_bytes, p.backward_peak_bytes, p.backward_order)
            for p in search.trade_offs
        ]
    )
print(json.dumps(found))
"""
PROGRAMS = {ALLOCATOR: REPLAYS, PARTITIONS: SEARCHES}
EVERY = pytest.mark.parametrize("core", CORES, ids=lambda core: core.folder)


def answer(core: CompiledCore, value: str) -> list[object]:
    environment = {**os.environ, core.variable: value, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", PROGRAMS[core]]
    root = Path(__file__).parent.parent.parent
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=300, cwd=root
    )
    found: list[object] = json.loads(result.stdout)
    return found


def is_up_to_date(core: CompiledCore) -> bool:
    """Whether there is a compiled core that was made of these files."""
    try:
        compiled = importlib.import_module(f"trainfit.{core.folder}.{core.compiled_name}")
    except ImportError:
        return False
    return bool(core.source_digest(PACKAGE / core.folder) == compiled.SOURCE_DIGEST)


@EVERY
def test_plain_python_can_be_chosen_and_says_the_same(core: CompiledCore) -> None:
    plain, usual = answer(core, "python"), answer(core, "")
    assert plain[0] is False
    assert usual[0] is is_up_to_date(core)
    assert plain[1:] == usual[1:]


@EVERY
def test_a_core_that_was_compiled_of_other_files_is_not_used(core: CompiledCore, tmp_path: Path) -> None:
    before = core.source_digest(PACKAGE / core.folder)
    for module in core.modules:
        shutil.copy(PACKAGE / core.folder / f"{module}.py", tmp_path)
    assert core.source_digest(tmp_path) == before
    (tmp_path / f"{core.modules[-1]}.py").write_text("# changed\n", encoding="utf-8")
    assert core.source_digest(tmp_path) != before


@EVERY
def test_the_joined_source_runs_on_its_own(core: CompiledCore) -> None:
    source = core.joined_source(PACKAGE / core.folder)
    assert "trainfit." not in source.replace("`trainfit.", "")
    names: dict[str, object] = {"__name__": "joined"}
    exec(compile(source, "joined", "exec"), names)
    assert names["SOURCE_DIGEST"] == core.source_digest(PACKAGE / core.folder)
    missing = [name for name in LOADERS[core].__all__ if name not in names and name != "COMPILED"]
    assert not missing


@EVERY
def test_no_name_is_in_two_of_the_joined_files(core: CompiledCore) -> None:
    """One would replace the other."""
    seen: dict[str, str] = {}
    for module in core.modules:
        for node in ast.parse((PACKAGE / core.folder / f"{module}.py").read_text(encoding="utf-8")).body:
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
