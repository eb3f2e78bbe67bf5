"""Run a function in several processes that are the ranks of one run, as torchrun would start them.

They are forked: torch is loaded once. The caller must not have computed anything with torch before.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

_FORK = multiprocessing.get_context("fork")


class RanksFailed(RuntimeError):
    """A rank has raised, or all together took too long."""


def run_ranks(function: Callable[[], Any], size: int, seconds: float = 240.0) -> list[Any]:
    """Call a function on every rank and return what each returned; one that fails ends all."""
    # As with torchrun, the store is not in one of the ranks, which may end before the others. Nor is it
    # here: it has a thread, and a process with threads must not be forked.
    ports, given = _FORK.Pipe(duplex=False)
    store = _FORK.Process(target=_keep_store, args=(given,), daemon=True)
    store.start()
    port = ports.recv()
    pipes = [_FORK.Pipe(duplex=False) for _ in range(size)]
    processes = [
        _FORK.Process(target=_rank, args=(function, rank, size, port, seconds, pipe[1]), daemon=False)
        for rank, pipe in enumerate(pipes)
    ]
    for process, pipe in zip(processes, pipes):
        process.start()
        pipe[1].close()
    end = time.monotonic() + seconds
    try:
        answers = [_answer(rank, pipe[0], end) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        store.kill()
    failures = [text for is_good, text in answers if not is_good]
    if failures:
        # Those that only say that another has failed are the longest in coming to the point.
        own = [text for text in failures if "has failed" not in text and "has ended" not in text]
        raise RanksFailed((own or failures)[0])
    return [value for _, value in answers]


def _keep_store(given: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    given.send(store.port)
    while True:
        time.sleep(3600)


def _answer(rank: int, pipe: Connection, end: float) -> tuple[bool, Any]:
    if not pipe.poll(max(end - time.monotonic(), 0.1)):
        return False, f"rank {rank} took too long"
    try:
        found: tuple[bool, Any] = pipe.recv()
    except EOFError:
        return False, f"rank {rank} died"
    return found


def _rank(
    function: Callable[[], Any], rank: int, size: int, port: int, seconds: float, pipe: Connection
) -> None:
    # Where a rank waits for ever, this says where.
    faulthandler.dump_traceback_later(max(seconds - 10, 1), exit=True)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    try:
        pipe.send((True, function()))
    except BaseException as error:
        text = "".join(traceback.format_exception(error)) if os.environ.get("TRACEBACKS") else str(error)
        pipe.send((False, f"rank {rank}: {type(error).__name__}: {text}"))
    pipe.close()
