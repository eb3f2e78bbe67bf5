"""Ctrl-C during a capture ends it wherever it arrives, and leaves nothing replaced behind.

Two moments are bad for an exception. While functions of torch and of `os` are replaced or put back, it
would leave some of them replaced for good. In `__del__` methods and callbacks of weak references, by which a
capture hears of every freed tensor, Python drops it and prints "Exception ignored in ...". So an interrupt
is raised in what `heard` calls, outside of destructors; anywhere else it waits and is sent again a moment
later, or raised at the end of a capture that is over by then.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

from trainfit.capturing.ledger import Ledger
from trainfit.capturing.modules import ModuleTable

_AGAIN_AFTER_SECONDS = 0.005
_CALLBACKS = {Ledger._storage_died.__code__, ModuleTable._forget.__code__}
Answer = TypeVar("Answer")


def heard(function: Callable[[], Answer]) -> Answer:
    """Call a function in which an interrupt of `interrupts_held` may be raised."""
    return function()


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Let interrupts wait, except for those that arrive in `heard`. Only the main thread gets any."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return

    waiting = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if _may_be_raised(frame):
            waiting.clear()
            usual(number, frame)
        else:
            waiting.set()
            _thread.start_new_thread(_interrupt_later, (waiting,))

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if waiting.is_set():
            waiting.clear()
            usual(signal.SIGINT, None)


def _may_be_raised(frame: FrameType | None) -> bool:
    # What runs is asked, not a flag: there would be a moment before it is set.
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code in _CALLBACKS:
            return False
        if frame.f_code is heard.__code__:
            return True
        frame = frame.f_back
    return False


def _interrupt_later(waiting: threading.Event) -> None:
    time.sleep(_AGAIN_AFTER_SECONDS)
    if waiting.is_set():
        _thread.interrupt_main()
