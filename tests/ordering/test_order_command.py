"""`trainfit order` and `trainfit.order` as a user calls them: results, keys, exit codes, clear messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from graph_text import graph
from typer.testing import CliRunner, Result

import trainfit
from trainfit.cli import commands as cli
from trainfit.ordering.simulator_json import graph_to_json

KEYS = {
    *("schema", "target", "device", "torch", "seconds", "ops", "warnings"),
    *("baseline_peak_bytes", "peak_bytes", "method", "methods", "lower_bound_bytes", "order"),
}
BRANCHES = """
    a =     : 100
    b =     : 100
    c = a   : 1
    d = b   : 1
    e = c d : 1 output
"""
STEP = """
import torch
import trainfit

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, 64) for _ in range(3))

    def forward(self, x):
        return torch.stack([head(x).exp().sum() for head in self.heads]).sum()

def build():
    return trainfit.Step.of(Net(), torch.randn(16, 8), loss=lambda y: y)

def without_backward():
    return trainfit.Step(model=torch.nn.Linear(2, 2), optimizer=None, run=lambda: None)

def raising():
    def run():
        raise ValueError("no batch left")
    return trainfit.Step(model=torch.nn.Linear(2, 2), optimizer=None, run=run)
"""


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("branches.json", graph_to_json(graph(BRANCHES)))
    Path("train.py").write_text(STEP, encoding="utf-8")


def write(name: str, document: Any) -> None:
    Path(name).write_text(json.dumps(document), encoding="utf-8")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["order", *arguments])


def test_a_graph_file_is_ordered() -> None:
    result = run("branches.json", "--json", "order.json")
    assert result.exit_code == 0, result.output
    assert "branches.json: the graph's peak falls from 201 B to 102 B, 49.3% less (predicted); optimal" in (
        " ".join(result.stdout.split())
    )
    for line in ("baseline (as given)", "lpmf", "bfs", "dfs", "best", "no order is below"):
        assert line in result.stdout
    found = json.loads(Path("order.json").read_text(encoding="utf-8"))
    assert found.keys() >= KEYS
    assert {"capture", "total"} <= found["seconds"].keys()
    assert (found["baseline_peak_bytes"], found["peak_bytes"], found["lower_bound_bytes"]) == (201, 102, 102)
    assert found["methods"]["baseline"] == 201
    assert sorted(found["order"]) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("kind", ["joint", "eager"])
def test_a_target_is_ordered(kind: str) -> None:
    result = run("train.py:build", "--graph", kind, "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found.keys() >= KEYS
    assert found["source"] == kind
    assert found["device"] == "cpu"
    assert found["lower_bound_bytes"] <= found["peak_bytes"] <= min(found["methods"].values())
    assert (found["last_use_peak_bytes"] is None) == (kind == "joint")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json"], "cannot read missing.json: No such file or directory"),
        (["cut.json"], "cut.json is truncated or not JSON"),
        (["cycle.json"], "cycle.json: 2 nodes wait for each other: "),
        (["negative.json"], "size_alloc of buffer 'a' is negative: -100"),
        (["branches.json", "--seconds", "0"], "time limit must be a number of seconds above zero, got 0.0"),
        (["branches.json", "--graph", "other"], "--graph must be one of joint, eager, got 'other'"),
        (["branches.json", "--json", "no/such/folder.json"], "there is no folder 'no/such'"),
        (["train.py:without_backward"], "the step never calls backward() on a loss"),
        (["train.py:raising"], "raised ValueError: no batch left"),
        (["no-such-model"], "no-such-model"),
    ],
)
def test_a_mistake_is_one_message(arguments: list[str], message: str) -> None:
    good = graph_to_json(graph(BRANCHES))
    Path("cut.json").write_text(json.dumps(good)[:60], encoding="utf-8")
    negative = json.loads(json.dumps(good).replace("100", "-100"))
    write("negative.json", negative)
    good["buffers"][2]["deps"], good["buffers"][3]["deps"] = ["d"], ["c"]
    write("cycle.json", good)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr or "no batch left" in message


def test_a_graph_without_nodes() -> None:
    write("empty.json", {"nodes": [], "buffers": []})
    result = run("empty.json", "--json", "-")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["peak_bytes"] == 0
    assert run("empty.json").exit_code == 0


def test_a_graph_file_needs_no_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom trainfit.cli import commands\n"
        "result = CliRunner().invoke(commands.app, ['order', 'branches.json'])\n"
        "assert result.exit_code == 0, result.output\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_function_takes_graphs_files_modules_and_traces() -> None:
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    assert trainfit.order(graph(BRANCHES)).peak_bytes == 102
    assert (
        trainfit.order("branches.json").peak_bytes == trainfit.order(Path("branches.json")).peak_bytes == 102
    )
    module = make_fx(lambda x: (x * 2).sum() + (x * 3).sum(), tracing_mode="fake")(torch.ones(64))
    assert trainfit.order(module).optimal
    assert torch.equal(trainfit.order.module(module)(torch.ones(64)), torch.tensor(320.0))
    with pytest.raises(trainfit.OptionError, match=r"order takes a graph, .* got int"):
        trainfit.order(7)
    with pytest.raises(trainfit.OptionError, match=r"options is a trainfit\.StepOptions, .* got dict"):
        trainfit.order("gpt2-tiny", options={"batch": 2})
    assert repr(trainfit.order) == "<function trainfit.order>"
