"""What stands for a value that consists of parts, or that cannot be taken apart."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

Parts = list[tuple[str, Any]]
"""What a value is made of; each name goes on where the value's own name ends."""


@dataclass(frozen=True)
class Kind:
    """What a container or a tensor with parts is; its parts have names of their own."""

    text: str


@dataclass(frozen=True)
class Unknown:
    """Something that cannot be taken apart."""

    text: str


def type_name(value: Any) -> str:
    """Name the class of a value."""
    # By name: a class that is defined inside `build` is another class in each run.
    return class_name(type(value))


def class_name(kind: type) -> str:
    """Name a class, with its module if it is not Python's own."""
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def attributes_of(value: Any, known: Collection[str] = ()) -> Parts:
    """Return the attributes that a value carries, in its `__dict__` and in slots, but for those known."""
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # a slot that is empty
                    found.setdefault(name, member.__get__(value))
    with contextlib.suppress(TypeError):  # it has none
        found |= vars(value)
    return [(f".{name}", part) for name, part in found.items() if name not in known]


def shown(value: Any) -> str:
    """Write a plain value down."""
    try:
        return repr(value)
    except ValueError:  # Python refuses to print thousands of digits
        return hex(value)
