"""Captures of `scale` that a second process makes: the same ones, and none is lost with the process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from trainfit.devices.device_table import find_device
from trainfit.errors import OptionError
from trainfit.models.recipe import StepOptions
from trainfit.scaling import captures_ahead
from trainfit.scaling.captures_ahead import CapturesAhead
from trainfit.scaling.mesh_candidates import MeshSizes
from trainfit.scaling.scale_question import Depth, ScaleQuestion, WantedCapture
from trainfit.traces.ranks import Cluster

QUESTION = ScaleQuestion(
    "llama-tiny", find_device("h100"), StepOptions(seq=16), cluster=Cluster(gpus_per_node=8)
)
WANTED = [
    WantedCapture(sizes, batch, Depth("layers", layers))
    for sizes in (MeshSizes(fsdp=4), MeshSizes(fsdp=2, tp=2), MeshSizes(replicate=2, fsdp=2))
    for batch in (1, 2)
    for layers in (2, 3)
]
PATIENCE_SECONDS = 60.0


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[CapturesAhead]:
    monkeypatch.setattr(captures_ahead.os, "sched_getaffinity", lambda _: {0, 1})
    found = CapturesAhead(QUESTION)
    yield found
    found.close()


def wait_until_captured(ahead: CapturesAhead, wanted: WantedCapture) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while wanted not in ahead._done and time.monotonic() < end:
        time.sleep(0.05)
    assert wanted in ahead._done


def test_captures_of_the_other_process_are_those_made_here(ahead: CapturesAhead) -> None:
    ahead.perhaps(WANTED)
    for wanted in WANTED[:2]:
        wait_until_captured(ahead, wanted)
        assert ahead.trace(wanted) == QUESTION.captured(wanted)
        assert wanted not in ahead._done
    # What nobody has captured yet is made here, and not there any more.
    last = WANTED[-1]
    assert ahead.trace(last) == QUESTION.captured(last)
    assert last not in ahead._perhaps


def test_what_is_wanted_soon_comes_before_what_may_be_wanted(ahead: CapturesAhead) -> None:
    ahead._soon += WANTED[:2]
    ahead._perhaps += WANTED[2:4]
    assert [ahead._next() for _ in range(4)] == [WANTED[1], WANTED[0], WANTED[2], WANTED[3]]


def test_a_killed_process_loses_nothing(ahead: CapturesAhead) -> None:
    ahead.perhaps(WANTED)
    assert ahead._process is not None
    ahead._process.kill()
    for wanted in WANTED[:3]:
        assert ahead.trace(wanted).settings.batch == wanted.batch


def test_what_fails_in_the_other_process_is_said_here(ahead: CapturesAhead) -> None:
    refused = WantedCapture(MeshSizes(tp=7), 1)
    ahead.perhaps([refused, *WANTED])
    wait_until_captured(ahead, WANTED[0])
    with pytest.raises(OptionError, match="7"):
        ahead.trace(refused)


def test_few_captures_and_code_of_the_user_stay_in_this_process(ahead: CapturesAhead) -> None:
    ahead.perhaps(WANTED[:3])
    assert ahead._process is None
    own = CapturesAhead(ScaleQuestion("model.py:build", find_device("h100"), StepOptions()))
    own.perhaps(WANTED)
    assert own._process is None
    own.close()


def test_one_whole_model_is_expected_at_a_time(ahead: CapturesAhead) -> None:
    ahead.perhaps(WANTED[:2])
    for fsdp in (2, 4):
        ahead.rather(WantedCapture(MeshSizes(fsdp=fsdp), 1))
    assert ahead._perhaps == [*WANTED[:2], WantedCapture(MeshSizes(fsdp=4), 1)]
