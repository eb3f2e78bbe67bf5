"""What each thread runs of a plan at the moment: the only state that steers regions.

Everything asks `execution`, which is another object in each thread. It counts instead of remembering what was
before: torch leaves a region that fails only when its traceback is freed, and another may run by then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

OnValueRead = Callable[[torch.Tensor], None]


class Execution(threading.local):
    """The regions that this thread is in, and who watches what they do."""

    def __init__(self) -> None:
        """Begin outside of all regions."""
        self.regions = 0
        """How many are running, in forward or again; a module inside of one is not a region itself."""
        self.level = 0
        """How many are recomputed. Who watches a region sees only what runs at the level it began at."""
        self._readers: list[tuple[int, OnValueRead]] = []

    @contextlib.contextmanager
    def forward(self, on_value_read: OnValueRead | None = None) -> Iterator[None]:
        """Run a region's forward; `on_value_read` hears of tensors whose values Python code reads."""
        reader = [] if on_value_read is None else [(self.level, on_value_read)]
        self._readers += reader
        self.regions += 1
        try:
            yield
        finally:
            self.regions -= 1
            for each in reader:
                self._readers.remove(each)

    @contextlib.contextmanager
    def recomputation(self) -> Iterator[None]:
        """Compute a region again: nothing in it is a region or counts as a call."""
        with self.forward(), self.unwatched():
            yield

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Run what is no op of the region around it."""
        self.level += 1
        try:
            yield
        finally:
            self.level -= 1

    @property
    def on_value_read(self) -> OnValueRead | None:
        """Who wants to know of a value that is read now."""
        if not self._readers or self._readers[-1][0] != self.level:
            return None
        return self._readers[-1][1]


execution = Execution()
