"""Progress on standard error for work that takes more than a second; silent unless a person is watching."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

_PATIENCE_SECONDS = 1.0


class Reporter:
    """Takes the names of stages as they begin, and how far a stage of many parts has come."""

    def __init__(self, update: Callable[..., Any]) -> None:
        """Remember the function that shows things."""
        self._update = update
        self._stage = ""

    def __call__(self, stage: str) -> None:
        """A stage begins."""
        self._stage = stage
        self._update(description=stage, total=None)

    def measuring(self, done: int, total: int, name: str) -> None:
        """So many parts of the stage are done, and this was the last of them."""
        self._update(description=f"{self._stage}: {done} of {total}, {name}", completed=done, total=total)


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
        BarColumn(bar_width=20),
        TextColumn("{task.description}", markup=False, table_column=Column()),  # wraps where it is narrow
        TimeElapsedColumn(),
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
