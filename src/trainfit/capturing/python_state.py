"""What Python code may decide by: the numbers, texts and lengths that a step can reach.

A counter that changes from one run of the step to the next may make a later run do something else (an
optimizer that steps every fourth time). What `run`, the model and the hooks refer to is looked at:
variables, attributes, globals that the code names, lists, generators, single numbers in arrays and tensors.
Of objects of Python or torch (a scheduler, a namespace) only the attributes that the user's code names are,
because torch itself counts many things. Nothing is called.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy
import torch
from torch import nn

from trainfit.capturing.python_parts import (
    HOOKS,
    is_installed,
    is_own,
    names_used,
    parts_of_function,
    parts_of_instance,
    parts_of_module,
    variables_of,
)
from trainfit.capturing.random_stream import HostRandomState
from trainfit.steps.step import Step

_MOST_VISITS = 20_000
_MOST_DEPTH = 8
_MOST_ITEMS = 64
"""How many items of a container are looked at; its length counts as well."""
_MOST_ELEMENTS = 4
"""The most elements of an array that may be a counter."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_OPAQUE = (torch.UntypedStorage, torch.device, torch.dtype, torch.Size)
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)


class _Length(int):
    """How many there are of something, or are left: not a counter of the program."""


KnownNumber = Callable[[torch.Tensor], object]
"""Returns the value of a tensor that is one known number, else None."""


class PythonState:
    """The state that a step can reach at one moment."""

    def __init__(self, step: Step, known_number: KnownNumber = lambda tensor: None) -> None:
        """Collect the state; takes milliseconds."""
        self._known_number = known_number
        self._found: dict[str, object] = {}
        self._names: dict[str, str] = {}
        self._random = HostRandomState()
        self._visited: set[int] = set()
        # Ids must stay those of the same objects while we look.
        self._alive: list[object] = []
        self._used: set[str] = set()
        """What the user's functions name: globals, attributes, keys."""
        self._used_by_program: set[str] = set()
        """The same without installed libraries, whose classes name far more than a step uses."""
        self._foreign: list[tuple[str, object, int, set[str]]] = []
        """Objects of Python or torch, with the names that were looked at."""
        self._pending: deque[tuple[str, object, int]] = deque()
        self._pending.extend((("run", step.run, 0), ("model", step.model, 0)))
        self._pending.extend((type(one).__name__, one, 0) for one in step.optimizers)
        while self._pending and len(self._visited) < _MOST_VISITS:
            self._visit(*self._pending.popleft())
            if not self._pending:
                self._look_at_foreign()
        del self._pending, self._alive, self._foreign, self._known_number

    def changes_to(self, later: PythonState) -> tuple[str, ...]:
        """Return the names, as the code has them, of what has another value later."""
        found = {later._names[place]: None for place in self._changed(later)}
        if not self._random.same_as(later._random):
            found["random numbers of Python or NumPy"] = None
        return tuple(found)

    def counts_to(self, later: PythonState) -> tuple[str, ...]:
        """Return the names of the numbers among those: they are taken for counters."""
        return tuple(
            {
                later._names[place]: None
                for place in self._changed(later)
                if isinstance(later._found[place], int | float | tuple)
                and not isinstance(later._found[place], _Length)
            }
        )

    def _changed(self, later: PythonState) -> list[str]:
        """Return the places that differ, except those inside of containers whose length differs."""
        changed = {
            place: None
            for place, value in later._found.items()
            if place not in self._found or _differ(self._found[place], value)
        }
        return [place for place in changed if place.rpartition("[")[0] not in changed]

    def _visit(self, place: str, value: object, depth: int) -> None:
        if type(value) in weakref.ProxyTypes:
            return  # of an object that may be gone, and then cannot be asked what it is
        if isinstance(value, _PLAIN):
            self._note(place, value)
            return
        if isinstance(value, torch.Tensor | numpy.ndarray | numpy.generic):
            self._note_number(place, value)
            return
        if isinstance(value, _OPAQUE) or id(value) in self._visited or depth > _MOST_DEPTH:
            return
        self._visited.add(id(value))
        self._alive.append(value)
        self._add(place, self._parts(place, value, depth), depth)

    def _add(self, place: str, parts: Iterable[tuple[str, object]], depth: int) -> None:
        for name, part in parts:
            inside = f"{place}{name}" if name.startswith("[") else f"{place}.{name}"
            self._pending.append((inside, part, depth + 1))

    def _look_at_foreign(self) -> None:
        """Look at what the user's functions name in foreign objects, as far as that is known by now."""
        for place, value, depth, looked_at in self._foreign:
            found = vars(value) if hasattr(value, "__dict__") else {}
            ignored = _counts_by_itself(value) - self._used_by_program
            names = {name for name in found if name in self._used or name in HOOKS}
            new = [name for name in found if name in names - looked_at - ignored]
            looked_at.update(new)
            self._add(place, [(name, found[name]) for name in new], depth)

    def _note(self, place: str, value: object) -> None:
        self._found[place] = value
        self._names[place] = ".".join(place.split(".")[-2:]).removeprefix("run.")

    def _note_number(self, place: str, value: Any) -> None:
        """Note the numbers in an array or a tensor, if they are few: one may be a counter."""
        if isinstance(value, torch.Tensor):
            known = self._known_number(value)
        elif isinstance(value, numpy.ndarray) and (value.size > _MOST_ELEMENTS or value.dtype.hasobject):
            known = None
        else:
            known = value.tolist()
        if known is not None:
            self._note(place, tuple(known) if isinstance(known, list) else known)

    def _parts(self, place: str, value: Any, depth: int) -> Iterable[tuple[str, object]]:
        """Return the parts of a value, by name; plain values are noted at once."""
        if isinstance(value, _CONTAINERS):
            self._note(place, _Length(len(value)))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return [
                (str(name) if isinstance(name, str) and name.isidentifier() else f"[{number}]", item)
                for number, (name, item) in enumerate(islice(items, _MOST_ITEMS))
            ]
        if isinstance(value, types.FunctionType):
            self._used |= names_used(value)
            self._used_by_program |= set() if is_installed(value) else names_used(value)
            return parts_of_function(value)
        if isinstance(value, types.MethodType):
            return [("self", value.__self__), (value.__name__, value.__func__)]
        if isinstance(value, _BOUND):
            return [("self", value.__self__)]
        if isinstance(value, functools.partial):
            return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
        if isinstance(value, types.GeneratorType):
            self._note(place, _Length(value.gi_frame.f_lasti) if value.gi_frame else None)
            return variables_of(value.gi_frame) if value.gi_frame else []
        if isinstance(value, numpy.random.Generator | numpy.random.RandomState | random.Random):
            self._note(place, _state_of(value))
            return []
        return self._parts_of_object(place, value, depth)

    def _parts_of_object(self, place: str, value: Any, depth: int) -> Iterable[tuple[str, object]]:
        if isinstance(value, type | types.ModuleType):
            if not is_own(value):
                return []
            self._foreign.append((place, value, depth, set()))  # only the attributes that are used
            return [pair for pair in vars(value).items() if isinstance(pair[1], _PLAIN)]
        if isinstance(value, nn.Module):
            return parts_of_module(value)
        if hasattr(type(value), "__next__") and not hasattr(value, "__dict__"):
            # How far an iterator has come, or, if it does not tell, something that is never equal.
            left = operator.length_hint(value, -1)
            self._note(place, _Length(left) if left >= 0 else object())
            return []
        if not is_own(type(value)):
            self._foreign.append((place, value, depth, set()))
            return []
        return parts_of_instance(value)


def _counts_by_itself(value: object) -> frozenset[str]:
    """Return the attributes in which torch or Python counts, and by which they decide nothing in a step."""
    if isinstance(value, torch.optim.Optimizer):
        return frozenset({"state"})  # how often it has stepped, for each parameter
    return frozenset({"modules"} if value is sys else ())


def _state_of(generator: Any) -> object:
    """Return what a generator of random numbers draws next by."""
    if isinstance(generator, numpy.random.Generator):
        return repr(generator.bit_generator.state)
    if isinstance(generator, numpy.random.RandomState):
        return repr(generator.get_state(legacy=False))
    try:
        return repr(generator.getstate())
    except NotImplementedError:
        return object()  # drawn from the system: never equal


def _differ(before: object, after: object) -> bool:
    """Whether two plain values differ; NaN is the same as NaN."""
    return type(before) is not type(after) or (before != after and not (before != before and after != after))
