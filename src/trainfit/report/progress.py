"""Progress on standard error for work that takes more than a second; silent unless a person is watching.

It says what is being done and for how long already, and the time left where the stage knows its parts.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

_PATIENCE_SECONDS = 1.0
_ROOM_FOR_A_BAR = 70
_SURE_AFTER_SECONDS = 0.5
"""What the first parts took says little about the rest."""


class Reporter:
    """Takes the names of stages as they begin, and how far a stage of many parts has come."""

    def __init__(self, update: Callable[..., Any], clock: Callable[[], float] = time.monotonic) -> None:
        """Remember the function that shows things."""
        self._update = update
        self._clock = clock
        self._stage = ""
        self._begin = clock()

    def __call__(self, stage: str) -> None:
        """A stage begins."""
        self._stage = stage
        self._begin = self._clock()
        self._update(description=stage, total=None, ends=None)

    def measuring(self, done: int, total: int, name: str) -> None:
        """So many parts of the stage are done, and this was the last of them."""
        now = self._clock()
        passed = now - self._begin
        sure = done > 0 and passed >= _SURE_AFTER_SECONDS
        self._update(
            description=f"{self._stage}: {done} of {total}, {name}",
            completed=done,
            total=total,
            ends=now + passed / done * (total - done) if sure else None,
        )


class _TimesShown(ProgressColumn):
    """How long the work has taken so far, and how long its present stage will still take, if known."""

    def render(self, task: Task) -> Text:
        """Write both in minutes and seconds."""
        text = Text(_minutes(task.elapsed or 0.0), "cyan")
        ends = task.fields.get("ends")
        if ends is not None:
            text.append(f", {_minutes(max(ends - time.monotonic(), 0.0))} left")
        return text


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"


@contextlib.contextmanager
def spinner(console: Console | None = None) -> Iterator[Reporter]:
    """Yield a reporter whose stages are shown after a second of waiting."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield Reporter(lambda **what: None)
        return
    # The user's own prints go where they always go: nothing is redirected.
    progress = Progress(
        SpinnerColumn(),
        *([BarColumn(bar_width=20)] if console.width >= _ROOM_FOR_A_BAR else ()),
        TextColumn("{task.description}", markup=False, table_column=Column()),  # wraps where it is narrow
        _TimesShown(table_column=Column(no_wrap=True)),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        refresh_per_second=5,
    )
    task = progress.add_task("starting", total=None)
    lock = threading.Lock()
    done = False

    def show() -> None:
        with lock:
            if not done:
                progress.start()

    timer = threading.Timer(_PATIENCE_SECONDS, show)
    timer.daemon = True
    timer.start()
    try:
        yield Reporter(functools.partial(progress.update, task))
    finally:
        timer.cancel()
        with lock:
            done = True
            progress.stop()
