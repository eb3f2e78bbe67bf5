"""A spinner on standard error for work that takes more than a second; silent unless a person is watching."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

_PATIENCE_SECONDS = 1.0


@contextlib.contextmanager
def spinner(console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Yield a function that takes the name of the stage that begins; shows it after a second of waiting."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage: None
        return
    # The user's own prints go where they always go: nothing is redirected.
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
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
        yield lambda stage: progress.update(task, description=stage)
    finally:
        timer.cancel()
        with lock:
            done = True
            progress.stop()
