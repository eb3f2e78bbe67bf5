"""What was there before a capture, so that the capture leaves nothing of itself behind."""

from __future__ import annotations

import functools
import gc
from typing import Any

from torch import nn

_LEAVE_ALONE = ("torch.", "trainfit.", "numpy.", "typing", "re")


class Surroundings:
    """The parameters and function caches that exist now."""

    def __init__(self) -> None:
        """Look around once; takes about 0.1 s in a large process."""
        self.parameters: set[int] = set()
        self._caches: dict[int, tuple[Any, int]] = {}
        for thing in gc.get_objects():
            kind = type(thing)
            if issubclass(kind, nn.Parameter):
                self.parameters.add(id(thing))
            elif kind is functools._lru_cache_wrapper:
                self._caches[id(thing)] = (thing, thing.cache_info().misses)

    def empty_new_caches(self) -> None:
        """Empty every `functools.cache` that was filled meanwhile: it may hold tensors without memory."""
        for thing in gc.get_objects():
            if type(thing) is not functools._lru_cache_wrapper:
                continue
            if (getattr(thing, "__module__", None) or "").startswith(_LEAVE_ALONE):
                continue
            _, misses = self._caches.get(id(thing), (None, 0))
            if thing.cache_info().misses != misses:
                thing.cache_clear()
