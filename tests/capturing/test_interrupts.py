"""Ctrl-C ends a capture wherever it arrives, and nothing is printed by Python about ignored exceptions."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from trainfit.capturing import capture, interrupts, replacing
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


def interrupt_in(monkeypatch: pytest.MonkeyPatch, place: str, after: int, owner: type = Ledger) -> None:
    """Let an interrupt arrive while the ledger, or another part, does something for the n-th time."""
    original = getattr(owner, place)
    calls = 0

    def interrupted(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after:
            signal.raise_signal(signal.SIGINT)
        return original(self, *args)

    monkeypatch.setattr(owner, place, interrupted)


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


def replaced_by_a_capture(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[Any, str], Any]:
    """Return what a capture replaces, in order, by owner and name."""
    found: dict[tuple[Any, str], Any] = {}
    install = replacing._Replacement.install

    def noted(self: Any) -> None:
        found.setdefault((self.owner, self.name), getattr(self.owner, self.name, None))
        install(self)

    with monkeypatch.context() as patch:
        patch.setattr(replacing._Replacement, "install", noted)
        capture(build)
    return found


@pytest.mark.parametrize("place", ["install", "remove"])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9])
def test_an_interrupt_leaves_nothing_replaced(
    place: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN an interrupt while functions are replaced for a capture, or put back after it
    originals = replaced_by_a_capture(monkeypatch)
    assert len(originals) > 50 and (os, "remove") in originals
    after = 1 + int(share * len(originals))
    with monkeypatch.context() as patch:
        interrupt_in(patch, place, after, replacing._Replacement)
        with pytest.raises(KeyboardInterrupt):
            capture(build)
    # THEN it ends the capture when all are put back: otherwise the next one could not guard what modules
    # have imported by name
    assert {(owner, name): getattr(owner, name, None) for owner, name in originals} == originals
    capture(build)


def test_another_thread_may_capture_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        interrupt_in(patch, "save", after=30)
        with pytest.raises(KeyboardInterrupt):
            capture(build)
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(capture(build)))
    thread.start()
    thread.join(60)
    assert len(done) == 1


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
