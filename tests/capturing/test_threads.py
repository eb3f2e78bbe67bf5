"""Threads that prepare data while the step runs: nothing of theirs gets mixed up with the step's."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from trainfit.capturing import capture
from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate

WIDTH, RUNS = 64, 6
MOST_RUNS = 2 * RUNS
"""The runs that are looked at, and those before them: beside all of them the thread works."""


@pytest.fixture(autouse=True)
def _switching_often() -> Iterator[None]:
    """Let Python change threads as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _beside(work: Callable[[], object], device: str) -> Callable[[], Step]:
    """Return a function that builds a step, beside which `work` is done all the while."""

    def build() -> Step:
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)]).to(device)
        data = torch.zeros(4, WIDTH, device=device)
        wanted = weakref.ref(model)
        runs: list[int] = []
        turns: list[int] = []

        def prepare() -> None:
            while wanted() is not None and len(runs) <= MOST_RUNS:
                work()
                turns.append(1)

        def run() -> None:
            if not runs:
                threading.Thread(target=prepare, daemon=True).start()
            runs.append(1)
            loss = model(data).square().mean()
            enough = len(turns) + 2
            while len(runs) <= MOST_RUNS and len(turns) < enough:
                time.sleep(1e-4)
            loss.backward()
            model.zero_grad()

        return Step(model, None, run)

    return build


def test_a_thread_that_prepares_data_on_the_host_changes_nothing_on_a_gpu() -> None:
    def work() -> object:
        return torch.empty(WIDTH, WIDTH, device="cpu").fill_(1.0).t().contiguous()

    # GIVEN what the step is without the thread
    alone = capture(_beside(lambda: None, "cuda"), device="cuda", steps=RUNS)
    # WHEN a thread makes tensors on the host all the while
    beside = capture(_beside(work, "cuda"), device="cuda", steps=RUNS)
    # THEN every run is the same: no tensor of the step was taken for one of the host's
    assert set(beside.steps.peaks[1:]) == set(alone.steps.peaks[1:])
    assert simulate(beside).peak_bytes == simulate(alone).peak_bytes
    assert [op.signature for op in beside.ops] == [op.signature for op in alone.ops]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_thread_makes_on_the_device_is_recorded_whole(device: str) -> None:
    def work() -> object:
        return torch.ones(WIDTH, WIDTH, device=device).exp()

    # WHEN a thread computes on the device while the step does, in every run that is looked at
    trace = capture(_beside(work, device), device=device, steps=RUNS)
    # THEN the trace holds together, and has the thread's ops besides the step's
    trace.check()
    names = {trace.signatures[op.signature].name for op in trace.ops}
    assert {"aten.exp.default", "aten.addmm.default"} <= names
