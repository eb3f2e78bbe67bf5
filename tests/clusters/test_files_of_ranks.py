"""Files that ask which rank they are when they are imported, as scripts for torchrun do."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import trainfit
from trainfit import Cluster

SCRIPT = """
import os
import torch, trainfit, torch.distributed as dist
from torch.distributed import init_process_group
from own_settings import RANK as NEIGHBOURS_RANK

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
init_process_group("nccl")
assert (dist.get_rank(), dist.get_world_size(), NEIGHBOURS_RANK) == (RANK, WORLD, RANK)


def build(device="cpu"):
    assert (dist.get_rank(), int(os.environ["RANK"])) == (RANK, RANK)
    model = torch.nn.Linear(16, 16 * (RANK + 1), device=device)
    inputs = torch.ones(4, 16, device=device)
    return trainfit.Step.of(model, inputs, loss=lambda output: output.sum())
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("own_settings", "train"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "own_settings.py").write_text('import os\nRANK = int(os.environ["RANK"])\n')
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_file_that_reads_its_rank_and_makes_the_group_when_imported(script: Path, device: str) -> None:
    for rank in (2, 0):
        trace = trainfit.capture(f"{script}:build", device=device, cluster=Cluster(4, rank))
        assert trace.settings.parameters == (16 + 1) * 16 * (rank + 1)
    assert not dist.is_initialized() and "RANK" not in os.environ


def test_it_is_imported_again_for_every_rank_that_is_looked_at(script: Path) -> None:
    found = trainfit.estimate(
        f"{script}:build", device="h100", cluster=Cluster(4), worst_rank=True, allocator=None
    )
    peaks = {one.rank: one.peak_bytes for one in found.ranks}
    assert set(peaks) == {0, 3} and peaks[3] > peaks[0]


def test_a_module_may_do_so_too(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(script.parent)
    for rank in (1, 3):
        trace = trainfit.capture("train:build", device="h100", cluster=Cluster(4, rank))
        assert trace.settings.parameters == (16 + 1) * 16 * (rank + 1)


def test_without_a_cluster_there_is_no_rank(script: Path) -> None:
    with pytest.raises(trainfit.TrainfitError, match=r"importing .*train\.py raised KeyError: 'RANK'"):
        trainfit.capture(f"{script}:build")
    assert not dist.is_initialized()
