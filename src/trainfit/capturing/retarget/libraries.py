"""Libraries that remember for the whole process which device there is must not learn it from a capture.

Accelerate looks once and keeps the answer for every later `Accelerator()`. While a capture for a GPU runs it
has to say that there is one, and afterwards what it said before.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

_ACCELERATE = "accelerate.state"
_SHARED = ("PartialState", "AcceleratorState", "GradientState")


@contextlib.contextmanager
def libraries_on(device: str) -> Iterator[None]:
    """Let libraries believe, for as long as the block runs, that `device` is where the step trains."""
    before = {name: dict(state) for name, state in _accelerate_states().items()}
    for state in _accelerate_states().values():
        if device == "cuda" and "device" in state:
            state["device"] = torch.device("cuda")
    try:
        yield
    finally:
        for name, state in _accelerate_states().items():
            state.clear()
            state.update(before.get(name, {}))


def _accelerate_states() -> dict[str, dict[str, Any]]:
    """Return what Accelerate shares between all of its objects, if it is loaded."""
    module = sys.modules.get(_ACCELERATE)
    return {name: getattr(module, name)._shared_state for name in _SHARED} if module is not None else {}
