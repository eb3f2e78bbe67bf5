"""Compiled code that torch finds again in another process: its plan is known, and warnings are repeated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainfit.compiling.compile_plan import PlannedGraph
from trainfit.compiling.recompute_problem import GraphLimits
from trainfit.compiling.remembered_plans import RememberedGraph, recalled, remember

PLANNED = """
import json, sys, warnings
import torch, trainfit
from torch import nn
from torch._dynamo.utils import counters

class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)
    def forward(self, x):
        x = self.second(torch.tanh(self.first(x)).sin())
        if len(sys.argv) > 2:
            torch._dynamo.graph_break()
        return self.second(torch.tanh(self.first(x)).sin()).square().mean()

torch.manual_seed(0)
model = Rows()
compiled = trainfit.compile(model, budget=sys.argv[1])
compiled(torch.ones(128, 16)).backward()
plan = compiled.compile_plan
found = counters["aot_autograd"]["autograd_cache_hit"]
print(json.dumps([found, plan.promised_bytes, plan.standing_bytes, [g.kept for g in plan.graphs], str(plan)]))
"""

CARRIED = """
import json, sys, warnings
import torch, trainfit
from torch import nn

plan = trainfit.load_plan(sys.argv[1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16))  # not the plan's model
model = torch.compile(model)
trainfit.apply(model, plan)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    model(torch.ones(128, 16)).sum().backward()
print(json.dumps([str(w.message) for w in said if "as the plan promises" in str(w.message)]))
"""


def run(code: str, folder: Path, *arguments: str) -> Any:
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
        "TRAINFIT_CACHE": str(folder / "ours"),
    }
    line = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("graphs", [1, 2])
def test_the_plan_of_code_that_is_found_again_is_known(tmp_path: Path, graphs: int) -> None:
    arguments = ("256KiB", *(["broken"] if graphs == 2 else []))
    found, *first = run(PLANNED, tmp_path, *arguments)
    assert not found and first[0] is not None and len(first[2]) == graphs
    found, *again = run(PLANNED, tmp_path, *arguments)
    assert found == graphs
    assert again == first
    # Without what was written down the graphs are planned anew.
    for file in (tmp_path / "ours" / "compiled").iterdir():
        file.unlink()
    _, *anew = run(PLANNED, tmp_path, *arguments)
    assert anew == first


def test_a_plan_that_is_not_carried_out_is_said_in_every_process(tmp_path: Path) -> None:
    code = (
        "import torch, trainfit; from torch import nn; from trainfit import Step\n"
        "def build():\n"
        "    model = nn.Sequential(nn.Linear(16, 64), nn.Sigmoid(), nn.Linear(64, 16))\n"
        "    return Step.of(model, torch.ones(128, 16), loss=lambda out: out.square().mean())\n"
        "from trainfit.plans.plan_store import save_plan\n"
        "plan = trainfit.plan_compiled(build, budget='1MiB')\n"
        f"save_plan(plan, {str(tmp_path / 'plan.json')!r})\n"
        "print('0')"
    )
    run(code, tmp_path)
    said = [run(CARRIED, tmp_path, str(tmp_path / "plan.json")) for _ in range(2)]
    assert [len(messages) for messages in said] == [1, 1]


def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path))
    graph = PlannedGraph(9, ("a", "b"), 8, 2, 0.5, 64, 96, 16, 4, GraphLimits(100, 100, 120.5))
    remember("key", RememberedGraph(graph, 1234))
    assert recalled("key") == RememberedGraph(graph, 1234)
    assert recalled("other") is None
    (file,) = (tmp_path / "compiled").iterdir()
    for text in ("", "{}", file.read_text().replace("1234", "1235"), file.read_text()[:-2]):
        file.write_text(text)
        assert recalled("key") is None
