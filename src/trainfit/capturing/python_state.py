"""What Python code may decide by: the numbers, texts and lengths that a step can reach.

A counter that changes from one run of the step to the next may make a later run do something else (an
optimizer that steps every fourth time). Looked at is what `run` and the model refer to: variables,
attributes, globals that the code names, lists, generators. Nothing is called, and what torch itself counts is
left out.
"""

from __future__ import annotations

import functools
import operator
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy
import torch
from torch import nn

from trainfit.capturing.random_stream import HostRandomState
from trainfit.step import Step

_MOST_VISITS = 20_000
_MOST_DEPTH = 8
_MOST_ITEMS = 64
"""Of a container are looked into; its length counts as well."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_OPAQUE = (torch.Tensor, torch.UntypedStorage, torch.device, torch.dtype, torch.Size, numpy.ndarray)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_LIBRARY = sysconfig.get_paths()["stdlib"]


class PythonState:
    """The state that a step can reach at one moment."""

    def __init__(self, step: Step) -> None:
        """Look around; takes milliseconds."""
        self._found: dict[str, object] = {}
        self._names: dict[str, str] = {}
        self._random = HostRandomState()
        self._visited: set[int] = set()
        # Ids must stay those of the same objects while we look.
        self._alive: list[object] = []
        self._pending: deque[tuple[str, object, int]] = deque()
        self._pending.append(("run", step.run, 0))
        self._pending.append(("model", step.model, 0))
        self._pending.extend((type(one).__name__, one, 0) for one in step.optimizers)
        while self._pending and len(self._visited) < _MOST_VISITS:
            self._visit(*self._pending.popleft())
        del self._pending, self._alive

    def changes_to(self, later: PythonState) -> tuple[str, ...]:
        """Return the names of what is another value later, as the code calls it."""
        found = {
            later._names[place]: None
            for place, value in later._found.items()
            if place not in self._found or _differ(self._found[place], value)
        }
        if not self._random.same_as(later._random):
            found["random numbers of Python or NumPy"] = None
        return tuple(found)

    def _visit(self, place: str, value: object, depth: int) -> None:
        if isinstance(value, _PLAIN):
            self._note(place, value)
            return
        if isinstance(value, _OPAQUE) or id(value) in self._visited or depth > _MOST_DEPTH:
            return
        self._visited.add(id(value))
        self._alive.append(value)
        for name, part in self._parts(place, value):
            self._pending.append((f"{place}.{name}", part, depth + 1))

    def _note(self, place: str, value: object) -> None:
        self._found[place] = value
        self._names[place] = ".".join(place.split(".")[-2:]).removeprefix("run.")

    def _parts(self, place: str, value: Any) -> Iterable[tuple[str, object]]:
        """Return what a value consists of, by name; what can be noted of itself is noted."""
        if isinstance(value, _CONTAINERS):
            self._note(place, len(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            return [
                (str(name) if _is_name(name) else "item", item) for name, item in islice(items, _MOST_ITEMS)
            ]
        if isinstance(value, types.FunctionType):
            return _parts_of_function(value)
        if isinstance(value, types.MethodType):
            return [("self", value.__self__), (value.__name__, value.__func__)]
        if isinstance(value, functools.partial):
            return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
        if isinstance(value, types.GeneratorType):
            self._note(place, value.gi_frame.f_lasti if value.gi_frame else None)
            return _variables(value.gi_frame) if value.gi_frame else []
        if isinstance(value, type | types.ModuleType):
            return (
                [pair for pair in vars(value).items() if isinstance(pair[1], _PLAIN)] if _own(value) else []
            )
        if isinstance(value, nn.Module):
            return _parts_of_module(value)
        if hasattr(type(value), "__next__") and not hasattr(value, "__dict__"):
            # How far an iterator has come, or, where it does not tell, something that is never the same.
            left = operator.length_hint(value, -1)
            self._note(place, left if left >= 0 else object())
            return []
        return _parts_of_instance(value) if _own(type(value)) else []


def _variables(frame: types.FrameType) -> list[tuple[str, object]]:
    """Return a frame's variables, and leave no trace: up to Python 3.12 it keeps the dictionary that it made.

    With it the frame would keep what was in the variables, such as the last batch of a loader.
    """
    found = frame.f_locals
    variables = list(found.items())
    if type(found) is dict:
        found.clear()
    return variables


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    code = function.__code__
    if not _is_users(code.co_filename):
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue  # not filled yet
    yield from ((name, function.__globals__[name]) for name in _names(code) if name in function.__globals__)
    if "__wrapped__" in vars(function):
        yield "__wrapped__", function.__wrapped__  # type: ignore[attr-defined]


@functools.cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Return the global names that a function and the functions in it use."""
    inner = (name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part))
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _parts_of_module(module: nn.Module) -> Iterator[tuple[str, object]]:
    yield from ((name, child) for name, child in module._modules.items() if child is not None)
    if _own(type(module)):
        yield from ((name, part) for name, part in vars(module).items() if name not in _OF_EVERY_MODULE)
        yield from _functions(type(module))


def _parts_of_instance(value: Any) -> Iterator[tuple[str, object]]:
    yield from vars(value).items() if hasattr(value, "__dict__") else ()
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items():
            if isinstance(slot, types.MemberDescriptorType):
                yield name, getattr(value, name, None)
    yield from _functions(type(value))


def _functions(kind: type) -> Iterator[tuple[str, object]]:
    """Yield the class, and the functions of it and its bases: they may use globals."""
    for base in kind.__mro__:
        if _own(base):
            yield base.__name__, base
            yield from ((n, part) for n, part in vars(base).items() if isinstance(part, types.FunctionType))


def _own(kind: type | types.ModuleType) -> bool:
    """Whether a class or a module is not Python's or torch's own; how data is loaded counts all the same."""
    name = kind.__name__ if isinstance(kind, types.ModuleType) else kind.__module__
    if name.startswith("torch.utils.data"):
        return True
    if name.split(".")[0] in ("torch", "numpy", "builtins", "trainfit"):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is None or _is_users(file)


@functools.cache
def _is_users(filename: str) -> bool:
    """Whether a file is the user's, or of a library that is neither Python's nor torch's."""
    in_library = filename.startswith(_LIBRARY) and "site-packages" not in filename
    return not in_library and "/torch/" not in filename and not filename.startswith("<frozen")


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier()


def _differ(before: object, after: object) -> bool:
    """Whether two plain values differ; NaN is the same as NaN."""
    return type(before) is not type(after) or (before != after and not (before != before and after != after))
