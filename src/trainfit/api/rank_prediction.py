"""Predict the step of one rank in a process of its own, which has no part in the real process groups."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from trainfit import errors
from trainfit.api.request import Request
from trainfit.errors import StepError, TargetError, TrainfitError, UserCodeError
from trainfit.traces.ranks import Cluster
from trainfit.traces.trace import Trace
from trainfit.traces.trace_store import load_trace, save_trace
from trainfit.workspace.measured import THOROUGH

_Failure = tuple[str, str, str]
"""The class of an error, its message, and the traceback of the user's code."""


def trace_in_child(request: Request, cluster: Cluster) -> Trace:
    """Capture the step of a rank in another process."""
    try:
        pickle.dumps(request)
    except Exception as error:
        raise TargetError(
            "to verify ranks, the step is captured in another process, which has to find the function that "
            "builds it: give its name, as in train.py:build, or a function at the top level of a module."
        ) from error
    with tempfile.TemporaryDirectory(prefix="trainfit-") as folder:
        file = Path(folder) / "trace.json"
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                failure = pool.submit(_capture_to, request, cluster, str(file)).result()
            except BrokenProcessPool:
                raise StepError(
                    f"the process that captures the step of rank {cluster.rank} has died; trainfit estimate "
                    "with the same --world-size and --rank may show why. A script that calls trainfit.verify "
                    'does so under if __name__ == "__main__".'
                ) from None
        if failure is not None:
            _raise(failure)
        return load_trace(str(file))


def _capture_to(request: Request, cluster: Cluster, file: str) -> _Failure | None:
    """Capture, in the other process, and save the trace; return what went wrong instead of raising it."""
    try:
        save_trace(request.trace(cluster=cluster, limits=THOROUGH), file)
    except UserCodeError as error:
        return "UserCodeError", str(error), error.user_traceback
    except TrainfitError as error:
        return type(error).__name__, str(error), ""
    return None


def _raise(failure: _Failure) -> None:
    name, message, traceback = failure
    if name == "UserCodeError":
        raise UserCodeError(message, traceback)
    raise getattr(errors, name, StepError)(message)
