"""Processes that a step starts, such as the workers of a `DataLoader`: ordinary Python, on real tensors.

A forked process inherits everything that a capture has replaced; there the originals are put back before
anything runs. What a process sends is in memory that it shares with the step's process: on the host, which
counts on a CPU only.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.multiprocessing.reductions as reductions

from trainfit.capturing.hollow import tensor_over
from trainfit.capturing.ledger import OUTSIDE
from trainfit.capturing.replacing import replaced

if TYPE_CHECKING:
    from trainfit.capturing.session import Session


@contextlib.contextmanager
def plain_processes(session: Session) -> Iterator[None]:
    """Keep the capture to this process."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(multiprocessing.process.BaseProcess, "run", lambda o: _run(session, o)))
        for name in ("rebuild_storage_fd", "rebuild_storage_filename"):
            stack.enter_context(replaced(reductions, name, lambda o: _rebuild(session, o)))
        yield


def _run(session: Session, original: Any) -> Callable[..., None]:
    parent = os.getpid()

    def run(self: multiprocessing.process.BaseProcess) -> None:
        if os.getpid() != parent:
            session.leave()
        original(self)

    return run


def _rebuild(session: Session, original: Any) -> Callable[..., Any]:
    def rebuild(*args: Any, **kwargs: Any) -> Any:
        storage = original(*args, **kwargs)
        enter_shared(session, storage)
        return storage

    return rebuild


def enter_shared(session: Session, storage: torch.UntypedStorage) -> None:
    """Enter a storage that another process has filled, if it is not known yet."""
    ledger, values = session.ledger, session.values
    if ledger.find_storage(storage) is not None:
        return
    known = values.worth_knowing(torch.float32, storage.nbytes() // 4)
    with torch.utils._python_dispatch._disable_current_modes():
        tensor = tensor_over(storage, torch.uint8, (storage.nbytes(),), (1,), 0)
        before, ledger.on_host = ledger.on_host, True if session.device == "cuda" else None
        try:
            ledger.register(tensor, OUTSIDE, known=known)
        finally:
            ledger.on_host = before
