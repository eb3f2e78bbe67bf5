"""A process that does rows for another one: a task comes in as a line of JSON, its row goes out as another.

What the steps print is not shown, and what they read from standard input is empty: both streams belong to the
conversation, and are moved out of their way first.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Any

_SET_PARENT_DEATH_SIGNAL = 1
"""As linux/prctl.h has it."""
COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from trainfit.sweeping.row_worker import serve; serve()"
)
"""What Python runs in the other process; its argument is where modules are found."""


def serve() -> None:
    """Do rows until there are no more, or nobody is left to hear about them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this one ends it
    _end_with_the_parent()
    tasks = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(nowhere, stream)
    from trainfit.sweeping.grid_tasks import RowTask
    from trainfit.sweeping.row_runner import RowRunner

    runner = RowRunner()
    _say(answers, {"ready": True})
    os.dup2(nowhere, 2)  # until now it said why this process could not begin
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for line in tasks:
        found = json.loads(line)
        row = runner.run(RowTask(found["number"], found["values"]))
        _say(answers, {"row": row})


def _end_with_the_parent() -> None:
    """Let Linux end this process when the one that started it ends, whatever it does then."""
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() == 1:  # it has ended already
        os._exit(0)


def _say(answers: int, what: dict[str, Any]) -> None:
    data = json.dumps(what, allow_nan=False).encode() + b"\n"
    while data:
        try:
            data = data[os.write(answers, data) :]
        except BrokenPipeError:
            os._exit(0)  # nobody is there any more
