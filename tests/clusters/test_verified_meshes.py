"""Divided built-in models on real ranks: every phase is measured as it was predicted, to the byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import trainfit

FIGURES = ("peak", "persistent", "forward", "backward", "optimizer")


def verified(ranks: int, target: str, mesh: str, *options: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command = [*torchrun, "-m", "trainfit", "verify", target, "--mesh", mesh, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize(
    ("ranks", "target", "mesh", "batch"),
    [
        (2, "gpt2-tiny", "tp=2", "2"),
        pytest.param(2, "mixtral-tiny", "tp=2", "2", marks=pytest.mark.slow),
        pytest.param(2, "llama-tiny", "pp=2", "4", marks=pytest.mark.slow),
        pytest.param(4, "llama-tiny", "dp=2,tp=2", "2", marks=pytest.mark.slow),
        pytest.param(4, "llama-tiny", "replicate=2,fsdp=2", "2", marks=pytest.mark.slow),
    ],
)
def test_every_rank_is_predicted_to_the_byte(
    ranks: int, target: str, mesh: str, batch: str, tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    done = verified(ranks, target, mesh, "--batch", batch, "--seq", "32", "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))["ranks"]
    assert [rank["rank"] for rank in found] == list(range(ranks))
    for rank in found:
        for figure in FIGURES:
            assert rank[f"predicted_{figure}_bytes"] == rank[f"measured_{figure}_bytes"], figure


def test_a_mesh_of_another_size_is_one_message() -> None:
    done = verified(2, "gpt2-tiny", "tp=4")
    assert done.returncode != 0
    assert "--mesh tp=4 takes 4 real processes to verify, and torchrun has started 2" in done.stderr


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with plans for both stages of a pipeline."""
    folder = tmp_path_factory.mktemp("stages")
    for rank, budget in enumerate(("21MiB", "47MiB")):
        cluster = trainfit.Cluster(world_size=2, rank=rank, mesh=(("pp", 2),))
        options = trainfit.StepOptions(batch=4, seq=256)
        plan = trainfit.plan("llama-tiny", budget=budget, options=options, cluster=cluster)
        assert plan.regions
        trainfit.save_plan(plan, folder / f"plan-{rank}.json")
    return folder


@pytest.mark.slow
def test_each_stage_of_a_pipeline_has_a_plan(stages: Path) -> None:
    files = ("--plan", str(stages / "plan-{rank}.json"), "--json", str(stages / "result.json"))
    done = verified(2, "llama-tiny", "pp=2", "--batch", "4", "--seq", "256", *files)
    assert done.returncode == 0, done.stderr
    result = json.loads((stages / "result.json").read_text(encoding="utf-8"))
    assert result["loss_equal"] and result["gradients_equal"] and not result["plan_differences"]
    for rank in result["ranks"]:
        assert rank["measured_peak_bytes"] < rank["baseline_measured_peak_bytes"]
        for figure in FIGURES:
            assert rank[f"predicted_{figure}_bytes"] == rank[f"measured_{figure}_bytes"], figure


def test_a_plan_of_another_stage_is_one_message(stages: Path) -> None:
    flags = ("--batch", "4", "--seq", "256", "--plan", str(stages / "plan-0.json"))
    done = verified(2, "llama-tiny", "pp=2", *flags)
    assert done.returncode != 0
    words = " ".join(done.stderr.split())
    assert "the plan was made for rank 0 of 2 (pp=2) and does not fit rank 1" in words
    assert "--plan plan-{rank}.json" in words
