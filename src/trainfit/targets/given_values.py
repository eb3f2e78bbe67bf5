"""Values that `--set name=value` gives: text, whose type follows from what it is for."""

from __future__ import annotations

import ast
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from trainfit.errors import OptionError

_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_SIMPLE = (bool, int, float, str, list, tuple, dict)


class Typed(str):
    """A value as it was typed; one that Python code gives is taken as it is."""

    __slots__ = ()


def read_assignments(texts: Sequence[str]) -> dict[str, Typed]:
    """Read what was typed after each `--set`."""
    found: dict[str, Typed] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not all(part.isidentifier() for part in name.split(".")):
            raise OptionError(f"--set takes name=value, as in --set layers=4, got {text!r}.")
        if name in found:
            raise OptionError(f"--set {name} is there twice: {found[name]!r} and {value!r}.")
        found[name] = Typed(value)
    return found


def refuse_unknown(values: Mapping[str, Any], known: Sequence[str], whose: str) -> None:
    """Refuse names that `whose` does not have, with the list of those that it has."""
    for name in values:
        if name == "device":
            raise OptionError("--set device: the device is named by --device (in Python: device=...).")
        if name not in known:
            listed = ", ".join(known) if known else "none"
            raise OptionError(f"--set {name}: {whose} has no {name!r}. There are: {listed}.")


def converted(name: str, value: Any, kind: Any = None) -> Any:
    """Return a typed value as the type that `kind` says: a type, a union, or None if nothing does."""
    if not isinstance(value, Typed):
        return value
    text, literal = str(value), _literal(value)
    if get_origin(kind) is typing.Literal:
        return _one_of(name, text, literal, get_args(kind))
    union = get_origin(kind) in (types.UnionType, typing.Union)
    kinds = [get_origin(one) or one for one in (get_args(kind) if union else (kind,))]
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    known = [one for one in kinds if one in _SIMPLE]
    for one in known:
        matches, result = _as(one, text, literal)
        if matches:
            return result
    if len(known) < len([one for one in kinds if one is not type(None)]):
        return literal  # a type that text alone cannot make: the function knows what to do with it
    wanted = " or ".join(one.__name__ for one in known)
    raise OptionError(f"--set {name}={text}: {name} is of type {wanted}.")


def _as(kind: type, text: str, literal: Any) -> tuple[bool, Any]:
    """Say whether the text is of a simple type, and return it so."""
    if kind is str:
        # Quotes around a text are the shell's habit, not part of it.
        return True, literal if isinstance(literal, str) else text
    if kind is bool:
        return text.lower() in _TRUTH, _TRUTH.get(text.lower())
    if kind is float:
        return type(literal) in (int, float), float(literal) if type(literal) in (int, float) else None
    if kind in (list, tuple):
        return isinstance(literal, list | tuple), kind(literal) if isinstance(literal, list | tuple) else None
    return type(literal) is kind, literal


def _one_of(name: str, text: str, literal: Any, allowed: tuple[Any, ...]) -> Any:
    for value in (text, literal):
        if any(value == one and type(value) is type(one) for one in allowed):
            return value
    raise OptionError(f"--set {name}={text}: it is one of {', '.join(map(str, allowed))}.")


def _literal(text: str) -> Any:
    """Read a number, a truth value, a list or the like as JSON or Python writes it; else it is the text."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(str(text))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            pass
    return str(text)
