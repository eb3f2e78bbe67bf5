"""A step divided among the devices of a mesh is the step that `estimate --mesh` predicts, with its share."""

from __future__ import annotations

import ast
import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import trainfit
from trainfit.api.find_ways import Ask
from trainfit.changes.change import StepChange
from trainfit.changes.kinds import changes_of
from trainfit.changes.unchanged_step import UnchangedStep
from trainfit.cli import commands as cli
from trainfit.devices.device_table import find_device
from trainfit.fitting.way_candidates import Candidates
from trainfit.models.recipe import StepOptions
from trainfit.planning.requests import bytes_of_budget
from trainfit.plans.ways import SAME_ARITHMETIC
from trainfit.traces.ranks import Cluster
from trainfit.traces.simulate import simulate


def asked(batch: int, *mesh: tuple[str, int]) -> Ask:
    cluster = Cluster(math.prod(size for _, size in mesh), mesh=mesh)
    return Ask("gpt2-tiny", "h100", StepOptions(batch=batch, seq=16), None, "default", cluster)


def offered(ask: Ask) -> dict[str, StepChange]:
    found = ask.captured(())
    assert found is not None
    step = UnchangedStep(found[0], find_device("h100"), "built-in", ask.takes, ask.cluster)
    return {change.name: change for change in changes_of(step) if change.kind == "sharding"}


def test_each_copy_has_its_share_of_the_samples() -> None:
    ask = asked(8, ("dp", 4))
    found = offered(ask)
    assert list(found) == ["sharding: fsdp=4", "sharding: replicate=4"]
    change = found["sharding: fsdp=4"]
    assert change.made.exactness == SAME_ARITHMETIC and not change.made.by_apply
    for part in ("fully_shard(m)", "fully_shard(model)", "isinstance(m, Block)", "--nproc-per-node 4"):
        assert part in change.made.code
    captured = ask.captured([change])
    assert captured is not None
    options = StepOptions(batch=2, seq=16)
    cluster = Cluster(4, mesh=(("fsdp", 4),))
    by_hand = trainfit.capture("gpt2-tiny", device="h100", options=options, cluster=cluster)
    assert simulate(captured[0]).peak_bytes == simulate(by_hand).peak_bytes
    assert len(captured[0].ops) == len(by_hand.ops)
    device = find_device("h100")
    budget_for = partial(bytes_of_budget, None)
    way = Candidates(ask.captured, budget_for(device), None, budget_for).unplanned([change])
    assert way is not None and way.samples == 8 and way.tokens == 8 * 16
    # What NCCL takes of the device is memory that it needs to run; a budget leaves a margin of the rest.
    taken = captured[1].device.communicator_bytes
    assert taken is not None and way.memory_bytes >= simulate(by_hand).peak_bytes + 0.9 * taken


def test_what_was_given_is_looked_at_beside_the_simple_ones() -> None:
    found = offered(asked(8, ("fsdp", 2), ("tp", 2)))
    assert list(found) == ["sharding: fsdp=2,tp=2", "sharding: fsdp=4", "sharding: replicate=4"]
    assert found["sharding: fsdp=2,tp=2"].options == {"batch": 4}
    assert "DistributedDataParallel(model)" in found["sharding: replicate=4"].made.code


@pytest.mark.parametrize(
    "mesh", [(("fsdp", 4),), (("replicate", 4),), (("fsdp", 2), ("tp", 2)), (("tp", 4),)]
)
def test_the_line_of_code_is_python(mesh: tuple[tuple[str, int], ...]) -> None:
    for change in offered(asked(8, *mesh)).values():
        ast.parse(change.made.code)


def test_samples_that_cannot_be_divided_say_so() -> None:
    ask = asked(3, ("fsdp", 2))
    change = offered(ask)["sharding: fsdp=2"]
    assert ask.captured([change]) is None
    reason = ask.impossible["sharding: fsdp=2"]
    assert reason == "3 samples cannot be divided among 2 copies: a multiple of 2 can, as in --batch 2"


def build() -> trainfit.Step:
    model = nn.Linear(4, 4)
    return trainfit.Step.of(model, torch.randn(2, 4), loss=torch.mean)


def test_what_fit_does_not_divide_is_one_message() -> None:
    with pytest.raises(trainfit.OptionError, match="fit divides built-in and hf: models"):
        trainfit.fit(build, device="h100", cluster=Cluster(2, mesh=(("fsdp", 2),)))
    for mesh, message in (("pp=2", "pp is for"), ("fdsp=2", "Did you mean fsdp"), ("x", "not a dimension")):
        result = CliRunner().invoke(cli.app, ["fit", "gpt2-tiny", "--device", "h100", "--mesh", mesh])
        assert result.exit_code == 2 and message in result.output, result.output


def test_the_command_shows_sharded_ways_with_their_code(tmp_path: Path) -> None:
    file = tmp_path / "fit.json"
    size, where = ["--batch", "8", "--seq", "128"], ["--device", "a100-40gb", "--budget", "100MiB"]
    asked = ["fit", "llama-tiny", *size, *where, "--mesh", "dp=4", "--keep-numerics", "--seconds", "15"]
    result = CliRunner().invoke(cli.app, [*asked, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "sharding: " in result.output and "torchrun --nproc-per-node 4" in result.output
    ways = json.loads(file.read_text())["ways_found"]
    sharded = [way for way in ways if any(change["kind"] == "sharding" for change in way["changes"])]
    assert sharded and all(way["results"] == SAME_ARITHMETIC for way in sharded)
    assert all(isinstance(ast.parse(way["code"][0]), ast.Module) for way in sharded)
    # All samples of the step, on all devices together.
    for way in sharded:
        assert way["tokens_per_second"] * way["step_seconds"] == pytest.approx(8 * 128)
