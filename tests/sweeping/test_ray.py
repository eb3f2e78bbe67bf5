"""The same rows on a local Ray cluster with several workers, some of which are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trainfit
from trainfit.sweeping.dispatching import Dispatcher
from trainfit.sweeping.grid_file import check_grid
from trainfit.sweeping.grid_tasks import RowTask, tasks_of
from trainfit.sweeping.ray_crew import RayCrew

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, and sockets that it leaves to its end

STEP = """
import os, signal
import torch, trainfit

def build(batch: int = 1, mode: str = "fine"):
    if mode == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "wrong":
        raise ValueError("the user's own mistake")
    model = torch.nn.Linear(8, 8)
    return trainfit.Step.of(model, torch.randn(batch, 8), loss=lambda y: y.mean())
"""


@pytest.fixture(autouse=True)
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster with room for two workers, in a folder with a step."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.py").write_text(STEP)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def test_rows_are_those_of_local_processes() -> None:
    grid = {"target": ["gpt2-tiny", "step.py:build"], "batch": [1, 2], "device": "h100"}
    here = trainfit.sweep(grid, jobs=1)
    there = trainfit.sweep(grid, output="table.csv", ray=True)
    for one, other in zip(here.rows, there.rows, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0} and one["error"] is None
    assert trainfit.sweep(grid, output="table.csv", jobs=1).data.kept == 4


def test_a_row_that_kills_its_workers_does_not_stop_the_others() -> None:
    modes = ["fine", "dies", "wrong"]
    found = trainfit.sweep({"target": "step.py:build", "device": "h100", "set": {"mode": modes}}, ray=True)
    fine, dies, wrong = (row["error"] for row in found.rows)
    assert fine is None
    assert dies.startswith("3 workers died over this row, the last one because it was lost: ")
    assert wrong == "build() in step.py raised ValueError: the user's own mistake"


def test_a_worker_that_is_killed_loses_nothing() -> None:
    killed: list[int] = []

    class Unlucky(RayCrew):
        """The first worker that gets a row is killed at once."""

        def give(self, worker: int, task: RowTask) -> None:
            process = self.process_of(worker)
            super().give(worker, task)
            if not killed:
                killed.append(process)
                os.kill(process, signal.SIGKILL)

    tasks = tasks_of(check_grid({"target": "gpt2-tiny", "batch": [1, 2, 4], "device": "h100"}))
    rows: dict[int, dict[str, Any]] = {}
    Dispatcher(Unlucky(), tasks, 2, lambda task, row: rows.update({task.number: row})).run()
    assert len(killed) == 1
    assert [rows[number]["error"] for number in range(3)] == [None] * 3


def test_an_address_without_a_cluster_is_one_message() -> None:
    ray.shutdown()
    with pytest.raises(
        trainfit.OptionError, match=r"--ray: cannot connect to 127.0.0.1:1: Connection refused"
    ):
        trainfit.sweep({"target": "gpt2-tiny", "device": "h100"}, ray="127.0.0.1:1")
