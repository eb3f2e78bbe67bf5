"""What is being done at the moment: whatever takes long says it here, and whoever waits listens.

Without a listener nothing happens. The command line shows what it hears (`report/progress.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

from trainfit.basics.units import format_seconds

Part = TypeVar("Part")
_LOOK_SECONDS = 0.2
Progress = Callable[[str], None]
"""Called with the name of each stage as it begins."""
Measuring = Callable[[int, int, str], None]
"""Called while a stage of many parts goes on: how many are done, of how many, and which it was."""


class _Listener(NamedTuple):
    progress: Progress | None = None
    measuring: Measuring | None = None
    outer: str = ""
    """The stages that this one is a part of."""


_NOBODY = _Listener()
_listener = ContextVar("listener", default=_NOBODY)


def doing(stage: str) -> None:
    """Say that a stage begins."""
    listener = _listener.get()
    if listener.progress is not None:
        listener.progress(listener.outer + stage)


def measuring() -> Measuring | None:
    """Return whom to tell how far a stage of many parts has come; None if nobody listens."""
    return _listener.get().measuring


@contextmanager
def _heard(listener: _Listener) -> Iterator[None]:
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def as_part_of(stage: str) -> AbstractContextManager[None]:
    """Say that a stage begins, and of whatever is said inside that it is a part of this stage."""
    doing(stage)
    listener = _listener.get()
    return _heard(listener._replace(outer=f"{listener.outer}{stage}: "))


def in_turn(stage: str, parts: Sequence[Part]) -> Iterator[Part]:
    """Yield parts of a stage that take about as long each; say which of them it is, and the time left."""
    begin = time.monotonic()
    for number, part in enumerate(parts):
        passed = time.monotonic() - begin
        left = f", about {format_seconds(passed / number * (len(parts) - number))} left" if number else ""
        with as_part_of(f"{stage} {number + 1} of {len(parts)}{left}"):
            yield part


@contextmanager
def counted(count: Callable[[], int], total: int, name: str) -> Iterator[None]:
    """Tell whoever listens, several times a second, how many of so many parts are done inside.

    For work that is too fine to say it for every part itself.
    """
    tell = measuring()
    if tell is None or not total:
        yield
        return
    over = threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_SECONDS):
            if 0 < (done := count()) <= total:
                tell(done, total, name)

    watcher = threading.Thread(target=look, daemon=True, name="trainfit-progress")
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def unheard() -> AbstractContextManager[None]:
    """Do something whose stages are of no interest to whoever waits."""
    return _heard(_NOBODY)


def heard_by(progress: Progress | None, measuring: Measuring | None = None) -> AbstractContextManager[None]:
    """Tell these functions what is being done inside; without any, whoever listened before goes on."""
    someone = progress is not None or measuring is not None
    return _heard(_Listener(progress, measuring) if someone else _listener.get())
