"""Iterators that a step must not advance: a batch that a capture takes from one is missing in training."""

from __future__ import annotations

import gc
import itertools
import operator
import types
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter

from trainfit.capturing.python_parts import variables_of
from trainfit.errors import StepError


def is_iterator(value: object) -> bool:
    """Whether a value is an iterator that cannot be put back where it was: of a data loader, or of Python."""
    if isinstance(value, _BaseDataLoaderIter):
        return True
    return hasattr(type(value), "__next__") and not hasattr(value, "__dict__")


class IteratorPlaces:
    """Where iterators are now."""

    def __init__(self) -> None:
        """Begin with none."""
        self._places: list[tuple[str, Any, object]] = []

    def note(self, name: str, value: Any) -> list[tuple[str, object]]:
        """Note where an iterator is; return the iterators and objects in it."""
        self._places.append((name, value, _place(value)))
        if isinstance(value, _BaseDataLoaderIter):
            return []
        return [(name, part) for part in gc.get_referents(value) if not isinstance(part, type)]

    def check(self) -> None:
        """Refuse what has been advanced: what comes next in it is no longer what came next before."""
        moved = dict.fromkeys(name for name, value, place in self._places if _place(value) != place)
        if moved:
            raise StepError(
                f"the step takes what it trains on from an iterator ({', '.join(moved)}), and looking at the "
                "step has used some of it up: training now would miss those batches. Take the batch first, "
                "and let the step get it: trainfit.autoplan(model, step, batch) calls step(batch)."
            )


def _place(value: Any) -> object:
    """Return something that is another when the iterator has been advanced, as far as it tells."""
    if isinstance(value, _BaseDataLoaderIter):
        return value._num_yielded
    if isinstance(value, types.GeneratorType):
        if value.gi_frame is None:
            return None
        held = tuple((name, id(part)) for name, part in variables_of(value.gi_frame))
        return value.gi_frame.f_lasti, held
    if isinstance(value, itertools.count):
        return repr(value)
    left = operator.length_hint(value, -1)
    if left >= 0:
        return left
    # A pair, a cycle: what it has at hand. Those in it are noted by themselves.
    return tuple(part for part in gc.get_referents(value) if isinstance(part, int))
