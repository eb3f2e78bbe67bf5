"""What a file finds while it is imported for a capture: its rank, and a GPU that need not be there.

`device = "cuda" if torch.cuda.is_available() else "cpu"` and `torch.cuda.set_device(...)` are often at the
top of a script. Only such lines get the GPU's answers: libraries that are imported meanwhile keep what they
find for the length of the process, and get the truth.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from trainfit.capturing.compiler import eager_only
from trainfit.capturing.distributed.fake_groups import rank_of
from trainfit.capturing.own_gpu import gpu_of
from trainfit.capturing.replacing import replaced
from trainfit.capturing.retarget.gpu import answers_of_accelerator, answers_of_cuda
from trainfit.capturing.retarget.streams import Streams
from trainfit.capturing.session import Session
from trainfit.capturing.values import is_script
from trainfit.devices.device_table import Device
from trainfit.traces.ranks import Cluster


@contextlib.contextmanager
def imported_for(device: Device, cluster: Cluster | None) -> Iterator[None]:
    """Import files as the rank of a cluster, which has the device."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(rank_of(cluster))
        if device.kind == "cuda":
            stack.enter_context(gpu_of(cluster))
            with eager_only():  # fake tensors read settings of the compiler, which a file need not load
                session = Session(device)
            streams = Streams(session.recorder)
            answers = {
                torch.cuda: answers_of_cuda(session.gpu, streams),
                torch.accelerator: answers_of_accelerator(session.gpu, streams),
            }
            for module, found in answers.items():
                for name, answer in found.items():
                    if callable(getattr(module, name, None)) and not isinstance(answer, type):
                        stack.enter_context(replaced(module, name, partial(_to_scripts, answer)))
        yield


def _to_scripts(answer: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        asked_by = sys._getframe(1).f_code.co_filename
        return (answer if is_script(asked_by) else original)(*args, **kwargs)

    return call
