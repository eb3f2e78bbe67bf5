"""The best mesh of each size: what is worked out is what captures say, others lose for the reason given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trainfit
from trainfit.allocator.named_options import named_options
from trainfit.cli.commands import app
from trainfit.costs.schedule import schedule
from trainfit.devices.device_table import find_device
from trainfit.errors import BudgetTooSmall, DeviceError, OptionError
from trainfit.scaling.captures_ahead import CapturesAhead
from trainfit.scaling.mesh_candidates import Division, MeshSizes
from trainfit.scaling.mesh_judge import PARTS, Judged, MeshJudge
from trainfit.scaling.scale_question import ScaleQuestion, depths_of
from trainfit.scaling.shape_captures import ShapeCaptures
from trainfit.scaling.why_slower import reason_for
from trainfit.traces.simulate import simulate

OPTIONS = trainfit.StepOptions(seq=128, dtype="bf16", set={"layers": 8})


def judge_of(*meshes: MeshSizes, target: str = "llama-tiny") -> MeshJudge:
    question = ScaleQuestion(target, find_device("h100"), OPTIONS)
    depths, depth = depths_of(question)
    captures = ShapeCaptures(CapturesAhead(question), depths)
    for one in meshes:
        captures.look_at(one)
    return MeshJudge(captures, depth, named_options("default"))


@pytest.mark.parametrize(
    ("target", "inner"), [("llama-tiny", {"tp": 2}), ("mixtral-tiny", {"ep": 2})], ids=["layers", "experts"]
)
def test_eight_layers_worked_out_from_two_and_three_are_as_captured(
    target: str, inner: dict[str, int]
) -> None:
    wanted = MeshSizes(fsdp=8, **inner)
    judge = judge_of(MeshSizes(fsdp=2, **inner), wanted, MeshSizes(fsdp=16, **inner), target=target)
    assert judge.depth == 8
    found = judge.judge(wanted, Division(4))
    assert found is not None
    cluster = trainfit.Cluster(world_size=16, mesh=wanted.mesh)
    options = trainfit.StepOptions(batch=4, seq=128, dtype="bf16", set={"layers": 8})
    truth = trainfit.capture(target, device="h100", options=options, cluster=cluster)
    peak = simulate(truth).peak_bytes
    asked = judge._ask(wanted, 4)
    assert asked is not None
    assert judge._deep(asked.kept).peak_bytes == pytest.approx(peak, rel=0.01)
    seconds = schedule(truth, trainfit.price(truth, "h100")).step_seconds
    assert found.seconds == pytest.approx(seconds, rel=0.01)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    # Two depths of: two sizes with two samples, and four samples for the line over the batch.
    assert judge.captures.count == 6


def judged(seconds: dict[str, float], memory: int = 1, share: float = 0.0) -> Judged:
    parts = dict.fromkeys(PARTS, 0.0)
    return Judged(MeshSizes(fsdp=8), Division(1), memory, 10, share, parts | seconds, 1.0)


def test_reasons() -> None:
    best = judged({"compute": 1.0})
    slower = judged({"compute": 1.0, "fsdp": 0.1, "recompute": 0.01})
    assert reason_for(slower, best) == (
        "11.0% slower: all-gathers and reduce-scatters of fsdp are exposed (+10.0%)"
    )
    assert reason_for(judged({}, memory=11, share=1.0), best) == (
        "does not fit: even with every block recomputed 1 B too much"
    )
    both = judged({"compute": 1.1, "bubble": 0.2})
    assert reason_for(both, best).startswith("30.0% slower: stages wait for each other")
    assert "its kernels take longer" in reason_for(both, best)
    # Of 1.5 s in kernels, 2 % may be saved by larger micro-batches: 1.47 s are left.
    pruned = judged({"compute": 1.5, "fsdp": 1.0})
    assert reason_for(pruned, best) == (
        "150.0% slower: all-gathers and reduce-scatters of fsdp are exposed (+100.0%); its kernels take "
        "longer: smaller products, or more of them (+50.0%); with larger micro-batches at least 47.0% "
        "slower: its kernels"
    )


def test_scale_of_a_small_model_is_confirmed(tmp_path: Path) -> None:
    result = trainfit.scale(
        "llama-tiny", "2,4", options=OPTIONS, global_batch=8, dimensions="fsdp,tp", device="h100"
    )
    assert [one.world_size for one in result.sizes] == [2, 4]
    for one in result.sizes:
        assert one.winner is not None
        assert one.winner.global_batch == 8
        assert one.winner.micro_batch * one.winner.accumulation * one.winner.copies == 8
        assert one.winner.memory_bytes <= one.winner.budget_bytes
        others = [row for row in one.others if row.fits]
        assert others and all(row.reason for row in others)
        assert all((row.step_seconds or 0.0) >= (one.winner.step_seconds or 0.0) for row in others)
    assert [one.winner.source for one in result.sizes if one.winner].count("confirmed") == 1
    confirmed = next(one for one in result.sizes if one.winner and one.winner.source == "confirmed")
    assert confirmed.winner is not None and confirmed.winner.step_seconds is not None
    assert confirmed.derived_step_seconds == pytest.approx(confirmed.winner.step_seconds, rel=0.05)
    assert "why not another mesh" in str(result)
    result.save_json(tmp_path / "scale.json")
    data = json.loads((tmp_path / "scale.json").read_text(encoding="utf-8"))
    assert data["sizes"][0]["winner"]["mesh"]
    result.save_csv(tmp_path / "tables")
    assert (tmp_path / "tables" / "sizes.csv").exists()


def test_whole_experts_are_looked_at_where_there_are_some() -> None:
    options = trainfit.StepOptions(seq=64, dtype="bf16")
    result = trainfit.scale(
        "mixtral-tiny", "8", options=options, device="h100", confirm="all", global_batch=16
    )
    (found,) = result.sizes
    assert found.winner is not None and found.winner.source == "confirmed"
    meshes = [dict(row.mesh) for row in (found.winner, *found.others)]
    assert any("ep" in mesh for mesh in meshes)
    assert not any("ep" in mesh and ("tp" in mesh or "pp" in mesh) for mesh in meshes)


def test_nothing_fits_is_exit_code_3() -> None:
    arguments = "scale llama-tiny --world-sizes 2 --dimensions fsdp --budget 1MiB --confirm none --seq 128"
    outcome = CliRunner().invoke(app, arguments.split())
    assert outcome.exit_code == BudgetTooSmall.exit_code == 3
    assert "fits on none of these" in outcome.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cpu"}, "is none whose speed is known"),
        ({"confirm": "some"}, "--confirm must be one of best, all, none"),
        ({"options": trainfit.StepOptions(batch=4)}, "--global-batch"),
        ({"gpus_per_node": 0}, "GPUs per node"),
        ({"budget": "x"}, "x"),
        ({"network": "fast"}, "--network 'fast' is not a speed"),
    ],
)
def test_mistakes_are_said_before_anything_is_captured(options: dict[str, object], said: str) -> None:
    with pytest.raises((OptionError, DeviceError), match=said):
        trainfit.scale("llama-tiny", 8, **options)  # type: ignore[arg-type]
