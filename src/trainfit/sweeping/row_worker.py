"""A process that does rows for another one: a task comes in as a line of JSON, its row goes out as one."""

from __future__ import annotations

import json
from typing import Any

from trainfit.basics.other_python import be_silent, say, talk


def serve_rows() -> None:
    """Do rows until there are no more, or nobody is left to hear about them."""
    tasks, answers = talk()
    from trainfit.sweeping.grid_tasks import RowTask
    from trainfit.sweeping.row_runner import RowRunner

    runner = RowRunner()
    say(answers, _line({"ready": True}))
    be_silent()
    for line in tasks:
        found = json.loads(line)
        row = runner.run(RowTask(found["number"], found["values"]))
        say(answers, _line({"row": row}))


def _line(what: dict[str, Any]) -> bytes:
    return json.dumps(what, allow_nan=False).encode() + b"\n"
