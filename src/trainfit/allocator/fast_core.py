"""The allocator's core as it runs here: compiled where that was possible at installation, else plain Python.

Both are the same source. `TRAINFIT_ALLOCATOR_CORE=python` chooses plain Python; `COMPILED` says which it is.
"""

from __future__ import annotations

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
from trainfit.allocator.replay_loop import run_events
from trainfit.allocator.stand_in_device import StandInDevice
from trainfit.basics.compiled_cores import ALLOCATOR

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


_module = ALLOCATOR.load()
COMPILED = _module is not None
if COMPILED:
    for _name in __all__[1:]:
        globals()[_name] = getattr(_module, _name)
