"""Workers that are processes of this machine. Each is a Python of its own, which talks by lines of JSON.

Not a pool of `multiprocessing`: it ends as a whole when one of its processes is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from trainfit.basics.other_python import started
from trainfit.sweeping.dispatching import WorkerEvent, event_of
from trainfit.sweeping.grid_tasks import RowTask
from trainfit.sweeping.row_worker import serve_rows

_CHUNK = 1 << 16
_PATIENCE_SECONDS = 5.0


@dataclass
class _Process:
    number: int
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    """What it says on standard error before it can begin."""
    heard: bytearray = field(default_factory=bytearray)


class LocalCrew:
    """Processes of this machine, by number."""

    def __init__(self) -> None:
        """Nobody works yet."""
        self._selector = selectors.DefaultSelector()
        self._crew: dict[int, _Process] = {}

    @property
    def process_ids(self) -> dict[int, int]:
        """The process of each worker."""
        return {number: worker.process.pid for number, worker in self._crew.items()}

    def start(self, worker: int) -> None:
        """Start a process."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115, closed with the process
        process = started(serve_rows, errors)
        self._crew[worker] = begun = _Process(worker, process, errors)
        assert process.stdout is not None
        self._selector.register(process.stdout, selectors.EVENT_READ, begun)

    def give(self, worker: int, task: RowTask) -> None:
        """Send a row; that a process has died is noticed where its answers are read."""
        stdin = self._crew[worker].process.stdin
        assert stdin is not None
        line = json.dumps({"number": task.number, "values": task.values}).encode() + b"\n"
        with contextlib.suppress(OSError):
            stdin.write(line)
            stdin.flush()

    def wait(self) -> Sequence[WorkerEvent]:
        """Return what has happened, once something has."""
        events: list[WorkerEvent] = []
        while not events:
            for key, _ in self._selector.select():
                events += self._read(key.data)
        return events

    def _read(self, worker: _Process) -> list[WorkerEvent]:
        assert worker.process.stdout is not None
        data = os.read(worker.process.stdout.fileno(), _CHUNK)
        if not data:
            return [WorkerEvent(worker.number, "died", reason=self._end(worker))]
        *lines, rest = (bytes(worker.heard) + data).split(b"\n")
        worker.heard = bytearray(rest)
        return [event_of(worker.number, json.loads(line)) for line in lines]

    def _end(self, worker: _Process) -> str:
        """Wait for a process that says nothing any more, and return why it ended."""
        assert worker.process.stdout is not None and worker.process.stdin is not None
        self._selector.unregister(worker.process.stdout)
        try:
            worker.process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:  # it has closed its output and goes on
            worker.process.kill()
        code = worker.process.wait()
        worker.errors.seek(0)
        said = worker.errors.read().decode(errors="replace").strip().splitlines()
        worker.process.stdout.close()
        with contextlib.suppress(OSError):
            worker.process.stdin.close()
        worker.errors.close()
        del self._crew[worker.number]
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            hint = "; this machine may have too little memory for it" if name == "SIGKILL" else ""
            return f"was ended by {name}{hint}"
        return f"ended with exit code {code}" + (f": {said[-1][:300]}" if said else "")

    def end(self, worker: int) -> None:
        """End a process that does nothing."""
        self._crew[worker].process.kill()
        self._end(self._crew[worker])

    def close(self) -> None:
        """End all processes."""
        for worker in list(self._crew.values()):
            worker.process.kill()
            self._end(worker)
        self._selector.close()
