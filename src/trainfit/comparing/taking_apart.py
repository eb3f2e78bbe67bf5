"""Take a value apart: every number, text and tensor in it, by name."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, NoneType, SimpleNamespace
from typing import Any

import numpy
import torch

from trainfit.comparing.kinds import Kind, Parts, Unknown, attributes_of, class_name, shown, type_name
from trainfit.comparing.tensors import array_parts, tensor_parts

_DEEPEST = 200
_PLAIN = frozenset((bool, int, float, complex, str, bytes, NoneType, torch.dtype, torch.device, torch.layout))
"""Types whose values say everything: they are compared as they are. Those that inherit from them may have
more to say."""
_PLAIN_PART: dict[type, Callable[[Any], Any]] = {
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes(memoryview(value)),
}
"""How to get the plain value out of one whose class inherits from it and may call anything equal."""
_TAKEN_APART = frozenset(
    (
        *(object, dict, OrderedDict, defaultdict, MappingProxyType),
        *(list, tuple, deque, set, frozenset, SimpleNamespace),
    )
)
"""Python's own containers, which keep nothing but what they hold."""
_OF_ENUMS = ("_name_", "_value_", "_sort_order_", "__objclass__")
_IS_WRITTEN_IN_PYTHON = 1 << 9
"""CPython's flag of classes that were made while Python runs."""

Contents = dict[str, Any]
"""The parts of a value by name: tensors, arrays and plain values, and what their containers are."""


def contents_of(value: Any, name: str = "result", *, copies: bool = True) -> Contents:
    """Take a value apart; without `copies`, nothing may write to its tensors until they are compared."""
    found: Contents = {}
    named: Counter[str] = Counter()
    for path, part in _parts(value, name, ()):
        if copies and isinstance(part, torch.Tensor):
            part = part.clone()
        elif copies and isinstance(part, numpy.ndarray):
            part = part.copy()
        # Two keys may look the same: NaN is another key each time.
        named[path] += 1
        found[path if named[path] == 1 else f"{path} ({named[path]})"] = part
    return found


def _parts(value: Any, path: str, ancestors: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value with their names; `ancestors` are the containers around it."""
    if type(value) in _PLAIN or isinstance(value, Kind | Unknown):
        yield path, value
    elif id(value) in ancestors:
        yield path, Kind(f"the container {len(ancestors) - ancestors.index(id(value))} levels up")
    elif len(ancestors) > _DEEPEST:
        yield path, Unknown(f"more than {_DEEPEST} levels deep")
    else:
        itself, inside = _taken_apart(value)
        yield path, itself
        for name, part in inside:
            yield from _parts(part, path + name, (*ancestors, id(value)))


def _taken_apart(value: Any) -> tuple[Any, Parts]:
    """Return what stands for a value itself, and its parts by name."""
    if isinstance(value, torch.Tensor):
        return tensor_parts(value)
    if isinstance(value, numpy.ndarray | numpy.generic):
        return array_parts(value)
    if isinstance(value, type):
        return value, []
    kind = Kind(type_name(value))
    if isinstance(value, range | slice):
        return kind, [(f".{name}", getattr(value, name)) for name in ("start", "stop", "step")]
    if isinstance(value, enum.Enum):
        return kind, [(".name", value._name_), (".value", value._value_), *attributes_of(value, _OF_ENUMS)]
    for plain, part in _PLAIN_PART.items():
        if isinstance(value, plain):
            return kind, [(f" as {plain.__name__}", part(value)), *attributes_of(value)]
    inside = _inside(value)
    return (Unknown(kind.text), []) if inside is None else (kind, inside)


def _inside(value: Any) -> Parts | None:
    """Return what a container holds, by name, and its attributes; None if it is no known container."""
    if isinstance(value, Mapping):
        found = _mapped(value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        found = [(f".{field}", part) for field, part in zip(value._fields, value)] + attributes_of(value)
    elif isinstance(value, tuple) and hasattr(value, "n_sequence_fields"):
        # As `os.stat` and `torch.max` return: fields may have names, and some are not in the sequence.
        hidden: Any = value.__reduce__()[1][1]
        found = _numbered(value) + [(f".{field}", part) for field, part in hidden.items()]
    elif isinstance(value, list | tuple | deque):
        found = _numbered(value) + attributes_of(value)
    elif isinstance(value, set | frozenset):
        found = _members(value) + attributes_of(value)
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        found = [(f".{name}", getattr(value, name)) for name in names] + attributes_of(value, names)
    elif isinstance(value, SimpleNamespace):
        found = attributes_of(value)
    else:
        return None
    return found + _hidden(value)


def _numbered(value: Any) -> Parts:
    return [(f"[{number}]", part) for number, part in enumerate(value)]


def _members(value: set[Any] | frozenset[Any]) -> Parts:
    """Name the members of a set, which has no order, by their values; the others cannot be told apart."""
    named = [part for part in value if _has_name(part)]
    found: Parts = [(f"{{{_shown(part)}}}", part) for part in named]
    others = len(value) - len(named)
    return [*found, ("{...}", Unknown(f"{others} members of a set"))] if others else found


def _mapped(value: Mapping[Any, Any]) -> Parts:
    """Name the entries of a mapping by their keys, or by their places where a key is no plain value."""
    found: Parts = []
    entries = list(value.items())
    for number, (key, held) in enumerate(entries):
        if _has_name(key):
            found.append((f"[{_shown(key)}]", held))
        else:
            found += [(f"[key {number}]", key), (f"[entry {number}]", held)]
    # What a defaultdict makes of a missing key is not in it. And what is held may be an attribute as well.
    known = {"default_factory", *(["data"] if isinstance(value, UserDict) else [])}
    by_name = {f".{key}": held for key, held in entries if type(key) is str}
    attributes = attributes_of(value, known)
    missing = object()
    return found + [(name, part) for name, part in attributes if by_name.get(name, missing) is not part]


def _has_name(key: Any) -> bool:
    """Whether a key or member can be named by its value."""
    if type(key) is tuple:
        return all(map(_has_name, key))
    return type(key) in _PLAIN or isinstance(key, type | enum.Enum)


def _shown(key: Any) -> str:
    if type(key) is tuple:
        return f"({', '.join(map(_shown, key))})"
    if isinstance(key, enum.Enum):
        return f"{type_name(key)}.{key._name_}"
    return class_name(key) if isinstance(key, type) else shown(key)


def _hidden(value: Any) -> Parts:
    """Name what a class inherits from one that is not written in Python and keeps what nobody sees."""
    return [
        (f" as {kind.__name__}", Unknown(class_name(kind)))
        for kind in type(value).__mro__
        if not kind.__flags__ & _IS_WRITTEN_IN_PYTHON and kind not in _TAKEN_APART
    ]
