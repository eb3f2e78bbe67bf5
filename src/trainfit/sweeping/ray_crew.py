"""Workers that are actors of a Ray cluster. They look for files where this process does: on a shared disk."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from trainfit.errors import MissingExtra, OptionError
from trainfit.sweeping.dispatching import WorkerEvent, event_of
from trainfit.sweeping.grid_tasks import RowTask

_PATIENCE_SECONDS = 20.0
INSTALL_LINE = "pip install -c constraints.txt 'trainfit[ray]'"


def load_ray() -> Any:
    """Return the library, or say how to get it."""
    try:
        import ray
    except ImportError:
        raise MissingExtra(f"--ray needs Ray, which is not installed:\n  {INSTALL_LINE}") from None
    return ray


def own_folders() -> list[str]:
    """Return where modules are found besides Python's own folders, which every machine has for itself."""
    folders = [os.path.abspath(part or os.getcwd()) for part in sys.path]
    return [one for one in folders if not one.startswith((sys.prefix + os.sep, sys.base_prefix + os.sep))]


def _refuse_silence(address: str | None) -> None:
    """Refuse an address at which nobody answers: Ray would wait for it for minutes."""
    host, _, port = (address or "").rpartition("/")[2].rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE_SECONDS).close()
    except (OSError, OverflowError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise OptionError(f"--ray: cannot connect to {address}: {reason}.") from None


class RayWorker:
    """What runs in the cluster: the same rows, done in the same way."""

    def __init__(self, folder: str) -> None:
        """Load what rows need; `folder` is where paths of the grid begin."""
        from trainfit.sweeping.row_runner import RowRunner

        if os.path.isdir(folder):
            os.chdir(folder)
        self._runner = RowRunner()

    def ready(self) -> dict[str, Any]:
        """Say that it can begin."""
        return {"ready": True}

    def run(self, number: int, values: dict[str, Any]) -> dict[str, Any]:
        """Do a row."""
        return {"row": self._runner.run(RowTask(number, values))}

    def process_id(self) -> int:
        """Return the process that it runs in."""
        return os.getpid()


class RayCrew:
    """Actors of a Ray cluster, by number."""

    def __init__(self, address: str | None = None) -> None:
        """Connect to an address, to what RAY_ADDRESS names, to a cluster of this machine, or to a new one."""
        self._ray = load_ray()
        self._ours = not self._ray.is_initialized()
        if self._ours:
            _refuse_silence(address)
            try:
                # It would print where its dashboard is, and what workers print.
                self._ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            except (OSError, ValueError, RuntimeError, self._ray.exceptions.RayError) as error:
                first = str(error).strip().splitlines() or [type(error).__name__]
                raise OptionError(
                    f"--ray: cannot connect to {address or 'a cluster'}: {first[0][:300]}"
                ) from None
        path = os.pathsep.join(own_folders())
        self._actor = self._ray.remote(
            num_cpus=1, max_restarts=0, runtime_env={"env_vars": {"PYTHONPATH": path}}
        )(RayWorker)
        self._actors: dict[int, Any] = {}
        self._asked: dict[Any, int] = {}
        """What is being waited for, and of which worker."""

    @property
    def size(self) -> int:
        """How many workers the cluster has room for."""
        return max(int(self._ray.cluster_resources().get("CPU", 1)), 1)

    def process_of(self, worker: int) -> int:
        """Return the process of a worker, on whatever machine it runs."""
        found: int = self._ray.get(self._actors[worker].process_id.remote())
        return found

    def start(self, worker: int) -> None:
        """Start an actor; it begins when the cluster has room for it."""
        self._actors[worker] = actor = self._actor.remote(os.getcwd())
        self._asked[actor.ready.remote()] = worker

    def give(self, worker: int, task: RowTask) -> None:
        """Give an actor a row to do."""
        self._asked[self._actors[worker].run.remote(task.number, task.values)] = worker

    def wait(self) -> Sequence[WorkerEvent]:
        """Return what has happened, once something has."""
        done, _ = self._ray.wait(list(self._asked), num_returns=1)
        return [self._answer(one) for one in done]

    def _answer(self, asked: Any) -> WorkerEvent:
        worker = self._asked.pop(asked)
        try:
            return event_of(worker, self._ray.get(asked))
        except self._ray.exceptions.RayError as error:
            del self._actors[worker]
            cause = str(error).strip().splitlines() or [type(error).__name__]
            return WorkerEvent(worker, "died", reason=f"was lost: {cause[0][:300]}")

    def end(self, worker: int) -> None:
        """End an actor that does nothing."""
        self._ray.kill(self._actors.pop(worker))

    def close(self) -> None:
        """End all actors, and the connection if it is ours."""
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        if self._ours:
            self._ray.shutdown()
