"""The allocator's core as it runs here: compiled where that was possible at installation, else plain Python.

Both are the same source. `TRAINFIT_ALLOCATOR_CORE=python` chooses plain Python; `COMPILED` says which it is.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from trainfit.allocator.allocator_state import AllocatorState
from trainfit.allocator.block_pools import MemoryBlock
from trainfit.allocator.caching_core import (
    allocate,
    empty_cache,
    free,
    record_stream,
    rounded_size,
    segment_size,
)
from trainfit.allocator.core_source import COMPILED_NAME, source_digest
from trainfit.allocator.replay_loop import run_events
from trainfit.allocator.stand_in_device import StandInDevice

__all__ = [
    "COMPILED",
    "AllocatorState",
    "MemoryBlock",
    "StandInDevice",
    "allocate",
    "empty_cache",
    "free",
    "record_stream",
    "rounded_size",
    "run_events",
    "segment_size",
]


def _compiled_core() -> Any:
    """Return the compiled module if there is one and it was made of these files; None otherwise."""
    if os.environ.get("TRAINFIT_ALLOCATOR_CORE") == "python":
        return None
    try:
        module = importlib.import_module(f"trainfit.allocator.{COMPILED_NAME}")
    except ImportError:
        return None
    return module if source_digest(Path(__file__).parent) == module.SOURCE_DIGEST else None


_module = _compiled_core()
COMPILED = _module is not None
if COMPILED:
    for _name in __all__[1:]:
        globals()[_name] = getattr(_module, _name)
