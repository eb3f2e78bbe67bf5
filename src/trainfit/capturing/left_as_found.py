"""What was there before a capture, so that the capture leaves nothing of itself behind."""

from __future__ import annotations

import functools
import gc
import time
import weakref

import torch
from torch import nn

_FunctionCache = functools._lru_cache_wrapper
_FILE_CLOCK = getattr(time, "CLOCK_REALTIME_COARSE", time.CLOCK_REALTIME)
"""The clock that file systems take their times from."""
_LEAVE_ALONE = {"torch", "trainfit", "numpy", "typing", "re"}
"""Packages whose function caches hold no tensors of the step."""


def file_time() -> float:
    """Return the time that a file would have if it were written now."""
    return time.clock_gettime(_FILE_CLOCK)


class FoundState:
    """The parameters and function caches that exist now."""

    def __init__(self, parameters_are_lent: bool = False) -> None:
        """Note what exists now; of parameters that are lent to the capture it does not matter."""
        self.file_time = file_time()
        self._default_dtype = torch.get_default_dtype()
        self._grad_enabled = torch.is_grad_enabled()
        kinds = set() if parameters_are_lent else _with_subclasses(nn.Parameter)
        wanted = {_FunctionCache, *kinds}
        # A process has some 300,000 objects: they are looked at once, and only at their types.
        found = [thing for thing in gc.get_objects() if type(thing) in wanted]
        self._parameters = {id(thing): weakref.ref(thing) for thing in found if type(thing) in kinds}
        self._caches = {
            id(thing): (thing, thing.cache_info().misses) for thing in found if type(thing) is _FunctionCache
        }

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter was there before."""
        reference = self._parameters.get(id(parameter))
        return reference is not None and reference() is parameter

    def put_back(self) -> None:
        """Undo what the user's code changed for the whole process, and drop tensors without memory.

        Every `functools.cache` that was filled meanwhile is emptied: it may hold such tensors.
        """
        torch.set_default_dtype(self._default_dtype)
        torch.set_grad_enabled(self._grad_enabled)
        for thing in [thing for thing in gc.get_objects() if type(thing) is _FunctionCache]:
            if (getattr(thing, "__module__", None) or "").partition(".")[0] in _LEAVE_ALONE:
                continue
            _, misses = self._caches.get(id(thing), (None, 0))
            if thing.cache_info().misses != misses:
                thing.cache_clear()


def _with_subclasses(kind: type) -> set[type]:
    """Return a class and all that inherit from it."""
    return {kind}.union(*(_with_subclasses(one) for one in type.__subclasses__(kind)))
