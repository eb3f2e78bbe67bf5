"""A Python of its own that works for this one: how it is started, and how its end of the talk begins.

Not one of `multiprocessing`: that would execute the user's script again. What the other one prints is not
shown, and what it reads from standard input is empty: both streams belong to the talk.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import IO, BinaryIO

_SET_PARENT_DEATH_SIGNAL = 1
"""As linux/prctl.h has it."""


def started(serve: Callable[[], None], errors: IO[bytes] | int) -> subprocess.Popen[bytes]:
    """Start a Python that calls a function of a module; `errors` takes what it says on standard error."""
    command = (
        "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        f"from {serve.__module__} import {serve.__name__}; {serve.__name__}()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", command, json.dumps([part or os.getcwd() for part in sys.path])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        # Ctrl-C goes to all processes of a session: who started this one decides what happens then.
        start_new_session=True,
    )


def talk() -> tuple[BinaryIO, int]:
    """Return, in the other process, what it is told, and where its answers go.

    Whatever runs there afterwards finds nothing on standard input, and nobody reads its standard output.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this one ends it
    _end_with_the_parent()
    told, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nowhere, stream)
    os.close(nowhere)
    return told, answers


def be_silent() -> None:
    """Show nothing any more, in the other process: until now it said why it could not begin."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def say(answers: int, data: bytes) -> None:
    """Send an answer, in the other process; end if nobody is there any more."""
    while data:
        try:
            data = data[os.write(answers, data) :]
        except BrokenPipeError:
            os._exit(0)


def _end_with_the_parent() -> None:
    """Let Linux end this process when the one that started it ends, whatever it does then."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() == 1:  # it has ended already
        os._exit(0)
