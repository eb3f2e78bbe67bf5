"""Divided built-in models on real ranks: every phase is measured as it was predicted, to the byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
