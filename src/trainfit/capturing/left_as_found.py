"""What was there before a capture, so that the capture leaves nothing of itself behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_FunctionCache = functools._lru_cache_wrapper
_FILE_CLOCK = getattr(time, "CLOCK_REALTIME_COARSE", time.CLOCK_REALTIME)
"""The clock that file systems take their times from."""
_LEAVE_ALONE = {"torch", "trainfit", "numpy", "typing", "re"}
"""Packages whose function caches hold no tensors of the step."""


def _of_kinds(kinds: set[type]) -> list[Any]:
    """Return the things of these types that the collector of cycles knows; without a loop in Python."""
    things = gc.get_objects()
    return list(itertools.compress(things, map(kinds.__contains__, map(type, things))))


def _with_subclasses(kind: type) -> set[type]:
    """Return a class and all that inherit from it."""
    below: list[type] = type.__subclasses__(kind)
    return {kind}.union(*map(_with_subclasses, below))


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
        # A process has some 300,000 objects, and one that keeps traces millions: they are gone over once.
        kinds: set[type] = set() if parameters_are_lent else _with_subclasses(nn.Parameter)
        things = _of_kinds(kinds | {_FunctionCache})
        self._parameters = {id(one): weakref.ref(one) for one in things if type(one) is not _FunctionCache}
        self._caches = [(one, one.cache_info().misses) for one in things if type(one) is _FunctionCache]

    def has(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter was there before."""
        reference = self._parameters.get(id(parameter))
        return reference is not None and reference() is parameter

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Find the function caches that are made meanwhile.

        While a step is captured, the collector looks at what was made since: before that ends, this is quick.
        """
        try:
            yield
        finally:
            known = {id(cache) for cache, _ in self._caches}
            self._caches += [(cache, 0) for cache in _of_kinds({_FunctionCache}) if id(cache) not in known]

    def put_back(self) -> None:
        """Undo what the user's code changed for the whole process, and drop tensors without memory.

        Every `functools.cache` that was filled meanwhile is emptied: it may hold such tensors.
        """
        torch.set_default_dtype(self._default_dtype)
        torch.set_grad_enabled(self._grad_enabled)
        for cache, misses in self._caches:
            if (getattr(cache, "__module__", None) or "").partition(".")[0] in _LEAVE_ALONE:
                continue
            if cache.cache_info().misses != misses:
                cache.cache_clear()
