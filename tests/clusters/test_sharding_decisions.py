"""Units of FSDP that are chosen: no uniform setting is faster, and the model computes the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from real_ranks import on_ranks
from sharded_runs import compared
from typer.testing import CliRunner

import trainfit
from trainfit.cli.commands import app
from trainfit.errors import BudgetTooSmall, FileFormatError, OptionError, PlanError
from trainfit.sharding.unit_search import search
from trainfit.sharding.unit_trials import Proposal, Setting, Trial

CLUSTER = trainfit.Cluster(world_size=16, mesh=(("fsdp", 16),), network_bytes_per_second=5e9)
OPTIONS = trainfit.StepOptions(batch=2, seq=512, dtype="bf16", set={"hidden": 512, "feed_forward": 2048})


def found_for(budget: str) -> trainfit.ShardingResult:
    return trainfit.plan_sharding(
        "llama-tiny", cluster=CLUSTER, device="h100", options=OPTIONS, budget=budget, seconds_limit=2
    )


@pytest.fixture(scope="module")
def roomy() -> trainfit.ShardingResult:
    return found_for("4GiB")


def test_with_room_units_stay_whole(roomy: trainfit.ShardingResult) -> None:
    """On a slow network the gathers of backward are exposed: with memory enough there are none."""
    sharding = roomy.sharding
    by_kept = {(row.units, row.kept, row.prefetch): row for row in roomy.data.tried}
    assert by_kept["blocks", 4, 1].step_seconds < by_kept["blocks", 0, 1].step_seconds
    assert sharding.step_seconds == min(row.step_seconds for row in roomy.data.tried if row.fits)
    assert sharding.memory_bytes <= sharding.budget_bytes
    assert roomy.data.bound_seconds <= sharding.step_seconds
    assert str(roomy).startswith("llama-tiny on h100")


def test_no_uniform_setting_is_faster_within_a_tight_budget(roomy: trainfit.ShardingResult) -> None:
    none = next(row for row in roomy.data.tried if row.usual == "reshard all")
    result = found_for(f"{int(none.memory_bytes * 0.8)}B")
    assert result.data.feasible
    # Each with its best plan is among what was tried.
    uniform = [row for row in result.data.tried if row.usual and row.fits]
    assert uniform
    assert all(result.sharding.step_seconds <= row.step_seconds for row in uniform)
    with pytest.raises(BudgetTooSmall, match="no setting of FSDP's units fits"):
        found_for("20MiB").check()


def test_the_model_computes_the_same_on_two_ranks(tmp_path: Path) -> None:
    """Other units, units that are kept, gathered ahead, and a plan: none of it changes a bit."""
    cluster = trainfit.Cluster(world_size=2, mesh=(("fsdp", 2),))
    options = trainfit.StepOptions(batch=2, seq=32)
    base = trainfit.plan_sharding("llama-tiny", cluster=cluster, device="h100", options=options).sharding
    blocks = tuple(f"blocks.{number}" for number in range(4))
    parts = tuple(name for block in blocks for name in (block, f"{block}.attention", f"{block}.feed_forward"))
    variants = {
        "kept": replace(base, units=blocks, kept=blocks[2:], prefetch=1, plan=None),
        "ahead": replace(base, units=blocks, kept=(), prefetch=2, plan=None),
        "parts": replace(base, units=parts, kept=parts[6:], prefetch=1, plan=None),
        "whole": replace(base, units=(), kept=(), prefetch=1, plan=None),
        "planned": _planned(cluster),
    }
    assert variants["planned"].plan is not None
    files = []
    for name, sharding in variants.items():
        files.append(str(tmp_path / f"{name}.json"))
        trainfit.save_sharding(sharding, files[-1])
        assert trainfit.load_sharding(files[-1]) == sharding
    assert on_ranks(2, compared, files) == [[True] * len(files)] * 2


def _planned(cluster: trainfit.Cluster) -> trainfit.Sharding:
    """Return a setting for a step that needs a plan: eight times as many tokens, and less memory."""
    options = trainfit.StepOptions(batch=2, seq=256)

    def found(budget: str) -> trainfit.ShardingResult:
        return trainfit.plan_sharding(
            "llama-tiny", cluster=cluster, device="h100", options=options, budget=budget, allocator=None
        )

    return found(f"{int(min(row.peak_bytes for row in found('1GiB').data.tried) * 0.9)}B").sharding


def test_a_function_of_ones_own_keeps_its_units(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, trainfit\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "def build(mesh, device: str = 'cpu'):\n"
        "    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3))).to(device)\n"
        "    for layer in model:\n"
        "        fully_shard(layer, mesh=mesh)\n"
        "    fully_shard(model, mesh=mesh)\n"
        "    inputs = torch.randn(8, 256, device=device)\n"
        "    optimizer = torch.optim.AdamW(model.parameters())\n"
        "    return trainfit.Step.of(model, inputs, loss=lambda out: out.sum(), optimizer=optimizer)\n",
        encoding="utf-8",
    )
    file, output = tmp_path / "shard.json", tmp_path / "result.json"
    words = f"shard {tmp_path / 'train.py'}:build --mesh dp=4 --device h100 -o {file} --json {output}"
    outcome = CliRunner().invoke(app, words.split())
    assert outcome.exit_code == 0, outcome.output
    assert trainfit.load_sharding(file).units == ("0", "1", "2")
    data = json.loads(output.read_text(encoding="utf-8"))
    assert {row["units"] for row in data["tried"]} == {"own"}
    assert {0, 3} <= {row["kept"] for row in data["tried"]}


def test_mistakes() -> None:
    sharding = trainfit.Sharding("x", "h100", ("0",), (), 1, 1, 1, 1, 1.0)
    with pytest.raises(PlanError, match="does not have; it was made for another model"):
        trainfit.shard(torch.nn.Linear(2, 2), sharding)
    with pytest.raises(PlanError, match="is what a sharding says for each unit"):
        trainfit.shard(torch.nn.Sequential(torch.nn.Linear(2, 2)), sharding, reshard_after_forward=True)
    outcome = CliRunner().invoke(app, ["shard", "llama-tiny", "--device", "h100"])
    assert outcome.exit_code == OptionError.exit_code
    assert "--mesh dp=8" in outcome.output


def test_a_damaged_file(tmp_path: Path) -> None:
    file = tmp_path / "shard.json"
    trainfit.save_sharding(trainfit.Sharding("x", "h100", ("0",), ("1",), 1, 1, 1, 1, 1.0), file)
    with pytest.raises(FileFormatError, match="what is kept is a list of units"):
        trainfit.load_sharding(file)


class ByHand:
    """Eight units of which the last five are kept fastest; with more of them the allocator needs room."""

    units = tuple(map(str, range(8)))

    def __init__(self) -> None:
        self.asked: list[Setting] = []
        self.room: list[int] = []

    def trial(self, setting: Setting) -> Trial:
        self.asked.append(setting)
        kept = len(setting.kept)
        values: dict[str, Any] = {"setting": setting, "units": self.units, "fits": kept <= 5}
        values["seconds"] = 10.0 + abs(kept - 5) + (setting.prefetch - 1)
        values["free_seconds"] = values["computing_seconds"] = 1.0
        values["plan"] = SimpleNamespace(memory_bytes=100 + kept, peak_bytes=100)
        return cast(Trial, SimpleNamespace(**values))

    def propose(self, setting: Setting, less_bytes: int = 0) -> Proposal | None:
        self.room.append(less_bytes)
        if setting.grain == "whole":
            return Proposal((), 99.0)
        return Proposal(self.units[2:] if less_bytes == 0 else self.units[3:], 1.0)


def test_the_search_leaves_room_for_the_allocator() -> None:
    """By hand: the first answer keeps six units and does not fit, the next has as much less as it lacked."""
    asked = ByHand()
    found = search(asked, (None, "whole"))
    assert found.best.setting == Setting(None, ByHand.units[3:])
    # What the program shows to be slower is not tried.
    assert not any(setting.grain == "whole" for setting in asked.asked)
    assert {Setting(None), Setting(None, ByHand.units)} <= set(asked.asked)
    assert asked.room[:2] == [0, 6]
    assert found.bound_seconds == 1.0


class FasterTogether(ByHand):
    """Parts of blocks are faster than blocks only if two of them are gathered ahead."""

    def trial(self, setting: Setting) -> Trial:
        self.asked.append(setting)
        together = setting.grain == "parts" and setting.prefetch > 1
        values: dict[str, Any] = {"setting": setting, "units": self.units, "fits": True}
        values["seconds"] = 8.0 if together else 10.0 + (setting.grain == "parts")
        values["free_seconds"] = values["computing_seconds"] = 1.0
        values["plan"] = SimpleNamespace(memory_bytes=100, peak_bytes=100)
        return cast(Trial, SimpleNamespace(**values))

    def propose(self, setting: Setting, less_bytes: int = 0) -> Proposal | None:
        return Proposal((), 1.0)


def test_units_and_what_is_gathered_ahead_are_chosen_together() -> None:
    asked = FasterTogether()
    assert search(asked, ("blocks", "parts", "whole")).best.setting == Setting("parts", (), 2)
    # The model alone has nothing to gather ahead.
    assert Setting("whole", (), 2) not in asked.asked
