"""Ctrl-C ends a capture wherever it arrives, and nothing is printed by Python about ignored exceptions."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from trainfit.capturing import capture, interrupts
from trainfit.capturing.ledger import Ledger
from trainfit.steps.step import Step

PLACES = ["release_saved", "_release", "save"]


@pytest.fixture(autouse=True)
def _python_s_own_handler() -> Iterator[None]:
    """A shell may have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def build() -> Step:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)])
    return Step.of(model, torch.randn(4, 8), loss=torch.sum)


def interrupt_in(monkeypatch: pytest.MonkeyPatch, place: str, after: int) -> None:
    """Let an interrupt arrive while the ledger does something for the n-th time."""
    original = getattr(Ledger, place)
    calls = 0

    def interrupted(self: Ledger, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after:
            signal.raise_signal(signal.SIGINT)
        return original(self, *args)

    monkeypatch.setattr(Ledger, place, interrupted)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_is_neither_lost_nor_printed(
    place: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    interrupt_in(monkeypatch, place, after=30)
    with pytest.raises(KeyboardInterrupt):
        capture(build, device=device)
    assert ignored == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()
    capture(build, device=device)


def test_an_interrupt_that_waits_longer_than_the_capture_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "_AGAIN_AFTER_SECONDS", 3600.0)
    interrupt_in(monkeypatch, "release_saved", after=30)
    with pytest.raises(KeyboardInterrupt):
        capture(build)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_capture_in_another_thread_leaves_signals_alone() -> None:
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(capture(build)))
    thread.start()
    thread.join()
    assert len(done) == 1


def test_an_interrupt_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    capture(build)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
