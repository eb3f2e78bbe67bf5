"""Ctrl-C during a capture waits for destructors to end: there Python drops an exception and only prints it.

A capture hears of every freed tensor, in `__del__` methods and callbacks of weak references. An interrupt
that arrives there would be lost, with "Exception ignored in ..." on the terminal. It is sent again a moment
later, or raised at the end of a capture that is over by then.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from trainfit.capturing.ledger import Ledger
from trainfit.capturing.modules import ModuleTable

_AGAIN_AFTER_SECONDS = 0.005
_CALLBACKS = {Ledger._storage_died.__code__, ModuleTable._forget.__code__}


@contextlib.contextmanager
def heard_between_destructors() -> Iterator[None]:
    """Let interrupts wait until no destructor runs. Only the main thread gets any."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return

    waiting = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if _in_destructor(frame):
            waiting.set()
            _thread.start_new_thread(_interrupt_later, (waiting,))
        else:
            waiting.clear()
            usual(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if waiting.is_set():
            waiting.clear()
            usual(signal.SIGINT, None)


def _in_destructor(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code in _CALLBACKS:
            return True
        frame = frame.f_back
    return False


def _interrupt_later(waiting: threading.Event) -> None:
    time.sleep(_AGAIN_AFTER_SECONDS)
    if waiting.is_set():
        _thread.interrupt_main()
