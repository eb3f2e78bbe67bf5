"""Who does which row next. A worker that dies loses nothing: its row is done again by another one.

Rows that share a capture go to one worker as long as others have something to do, because the capture is
what takes long. A worker that has run a user's code is replaced before it gets another target. A crew is any
set of workers: processes of this machine, or of a Ray cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from trainfit.errors import TrainfitError
from trainfit.sweeping.grid_tasks import RowTask
from trainfit.sweeping.row_runner import Row, failed_row

MOST_DEATHS = 3
"""After how many deaths of workers over it a row counts as failed."""
_MOST_FALSE_STARTS = 3

Finished = Callable[[RowTask, Row], None]


@dataclass(frozen=True)
class WorkerEvent:
    """What happened to a worker: it can begin, it has done its row, or it has died."""

    worker: int
    kind: Literal["ready", "row", "died"]
    row: Row | None = None
    reason: str = ""


class Crew(Protocol):
    """Workers by number. Each does one row at a time."""

    def start(self, worker: int) -> None:
        """Start a worker; an event says when it can begin."""

    def give(self, worker: int, task: RowTask) -> None:
        """Give a worker a row to do."""

    def wait(self) -> Sequence[WorkerEvent]:
        """Return what has happened, once something has."""

    def end(self, worker: int) -> None:
        """End a worker that does nothing; no event says so."""

    def close(self) -> None:
        """End all workers, whatever they do."""


class Dispatcher:
    """Gives rows to workers until all are done."""

    def __init__(self, crew: Crew, tasks: Sequence[RowTask], jobs: int, finished: Finished) -> None:
        """`finished` is called with each row as it is done."""
        self._crew = crew
        self._finished = finished
        self._waiting: dict[bytes, list[RowTask]] = {}
        for task in tasks:
            self._waiting.setdefault(task.capture, []).append(task)
        self._left = len(tasks)
        self._jobs = min(jobs, len(tasks))
        self._idle: set[int] = set()
        self._doing: dict[int, RowTask] = {}
        self._last: dict[int, RowTask] = {}
        """What a worker did last: it has that capture, and that code imported."""
        self._deaths: Counter[int] = Counter()
        self._ever_ready = False
        self._false_starts = 0

    def run(self) -> None:
        """Do all rows; workers are ended however this ends."""
        try:
            for worker in range(self._jobs):
                self._crew.start(worker)
            while self._left:
                for event in self._crew.wait():
                    self._handle(event)
                self._give_out()
        finally:
            self._crew.close()

    def _handle(self, event: WorkerEvent) -> None:
        if event.kind == "died":
            self._bury(event)
            return
        self._ever_ready = True
        if event.kind == "row":
            assert event.row is not None
            self._finish(self._doing.pop(event.worker), event.row)
        self._idle.add(event.worker)

    def _finish(self, task: RowTask, row: Row) -> None:
        self._left -= 1
        self._finished(task, row)

    def _bury(self, event: WorkerEvent) -> None:
        """Take the row of a dead worker back, and start another worker in its place."""
        self._idle.discard(event.worker)
        self._last.pop(event.worker, None)
        task = self._doing.pop(event.worker, None)
        if task is not None:
            self._deaths[task.number] += 1
            if self._deaths[task.number] < MOST_DEATHS:
                self._put_back(task)
            else:
                reason = f"{MOST_DEATHS} workers died over this row, the last one because it {event.reason}"
                self._finish(task, failed_row(task, reason))
        elif not self._ever_ready:
            self._false_starts += 1
            if self._false_starts >= _MOST_FALSE_STARTS:
                raise TrainfitError(f"no worker can start: the last one {event.reason}.")
        if self._left:
            self._crew.start(event.worker)

    def _put_back(self, task: RowTask) -> None:
        self._waiting.setdefault(task.capture, []).insert(0, task)

    def _give_out(self) -> None:
        for worker in sorted(self._idle):
            task = self._next(worker)
            if task is None:
                return
            self._idle.discard(worker)
            last = self._last.get(worker)
            if last is not None and _clash(last, task):
                self._put_back(task)
                del self._last[worker]
                self._crew.end(worker)
                self._crew.start(worker)
                continue
            self._doing[worker] = self._last[worker] = task
            self._crew.give(worker, task)

    def _next(self, worker: int) -> RowTask | None:
        """Return a row: of the worker's own capture, of one that nobody has, or of the one with most left."""
        taken = {task.capture for task in self._doing.values()}
        own = self._last[worker].capture if worker in self._last else None
        free = next((one for one in self._waiting if one not in taken), None)
        most = max(self._waiting, key=lambda one: len(self._waiting[one]), default=None)
        chosen = own if own in self._waiting else free if free is not None else most
        if chosen is None:
            return None
        tasks = self._waiting[chosen]
        task = tasks.pop(0)
        if not tasks:
            del self._waiting[chosen]
        return task


def _clash(last: RowTask, task: RowTask) -> bool:
    """Whether the code of one target may meet what another one imported: a module of the same name, say."""
    targets = {str(one.values["target"]) for one in (last, task)}
    return len(targets) > 1 and any(":" in one and not one.startswith("hf:") for one in targets)


def event_of(worker: int, said: dict[str, Any]) -> WorkerEvent:
    """Return what a worker said as an event."""
    return WorkerEvent(worker, "row", said["row"]) if "row" in said else WorkerEvent(worker, "ready")
