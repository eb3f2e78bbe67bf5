"""Captures for `scale`, half of them made by a second process before they are asked for.

What is wanted soon is known, and what may be wanted after that: while this process works out what one capture
means, or makes another, the second one makes the next. Which of them made it changes nothing about a capture.
A model that is the user's own code is captured here only, where the user expects it to run.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from trainfit.basics.other_python import be_silent, say, started, talk
from trainfit.errors import TrainfitError
from trainfit.scaling.scale_question import ScaleQuestion, WantedCapture
from trainfit.traces.trace import Trace

_WORTH_A_PROCESS = 8
"""Captures that may be wanted: with fewer, they are done before another Python has begun."""


class CapturesAhead:
    """Captures by what is wanted; the second process is started once enough may be."""

    def __init__(self, question: ScaleQuestion) -> None:
        """Nothing is captured yet, and there is no other process."""
        self.question = question
        self._changed = threading.Condition()
        self._soon: list[WantedCapture] = []
        self._perhaps: list[WantedCapture] = []
        self._doing: WantedCapture | None = None
        """What the other process is at."""
        self._done: dict[WantedCapture, Trace] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._feeder = threading.Thread(target=self._feed, daemon=True, name="trainfit-captures")
        self._ended = False

    def trace(self, wanted: WantedCapture) -> Trace:
        """Return a capture: that of the other process, if it has it or is at it, or one that is made here."""
        with self._changed:
            self._changed.wait_for(lambda: self._doing != wanted)
            if wanted in self._done:
                return self._done.pop(wanted)
            for waiting in (self._soon, self._perhaps):
                if wanted in waiting:
                    waiting.remove(wanted)
        return self.question.captured(wanted)

    def soon(self, wanted: Sequence[WantedCapture]) -> None:
        """Say what will be asked for next, in this order; the other process begins at its end."""
        self._wait_for(self._soon, wanted)

    def perhaps(self, wanted: Sequence[WantedCapture]) -> None:
        """Say what may be asked for later, the likeliest first."""
        self._wait_for(self._perhaps, wanted)
        if self._process is None and not self._ended and len(self._perhaps) >= _WORTH_A_PROCESS:
            self._begin()

    def rather(self, whole: WantedCapture) -> None:
        """Say that of all whole models this one may be asked for, and none of those said before."""
        with self._changed:
            self._perhaps[:] = [one for one in self._perhaps if one.depth.layers is not None]
        self._wait_for(self._perhaps, [whole])

    def close(self) -> None:
        """End the other process, whatever it does."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._feeder.join()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what was not sent any more
                stream.close()  # type: ignore[union-attr]

    def _wait_for(self, waiting: list[WantedCapture], wanted: Sequence[WantedCapture]) -> None:
        with self._changed:
            known = {*self._done, self._doing, *waiting}
            waiting += [one for one in wanted if one not in known]
            self._changed.notify_all()

    def _begin(self) -> None:
        """Start the other process, if there is a processor for it."""
        if self.question.runs_own_code or len(os.sched_getaffinity(0)) < 2:
            return
        self._process = started(serve_captures, subprocess.DEVNULL)
        self._feeder.start()

    def _feed(self) -> None:
        """Give the other process one capture after the other; if it ends, all are made here."""
        assert self._process is not None and self._process.stdin and self._process.stdout
        told, answers = self._process.stdin, self._process.stdout
        try:
            pickle.dump(replace(self.question), told)
            while (wanted := self._next()) is not None:
                pickle.dump(wanted, told)
                told.flush()
                found = pickle.load(answers)
                with self._changed:
                    self._doing = None
                    if found is not None:  # what fails there is tried here, so that the user sees why
                        self._done[wanted] = found
                    self._changed.notify_all()
        except (OSError, EOFError, pickle.PickleError):
            pass
        finally:
            with self._changed:
                self._doing, self._ended = None, True
                self._changed.notify_all()

    def _next(self) -> WantedCapture | None:
        """Wait for something to capture; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._soon or self._perhaps)
            if self._ended:
                return None
            # This process takes what is wanted soon from the beginning.
            self._doing = self._soon.pop() if self._soon else self._perhaps.pop(0)
            return self._doing


def serve_captures() -> None:
    """Capture, in the other process, what is wanted, until nobody wants anything."""
    told, answers = talk()
    be_silent()
    question: ScaleQuestion = pickle.load(told)
    while (wanted := _told(told)) is not None:
        try:
            found: Trace | None = question.captured(wanted)
        except TrainfitError:
            found = None
        say(answers, pickle.dumps(found))


def _told(told: BinaryIO) -> Any:
    try:
        return pickle.load(told)
    except EOFError:
        return None
