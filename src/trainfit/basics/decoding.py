"""JSON into dataclasses: each value is of the type that its field says, or one message says which is not.

Fields may be int, float, bool, str, a `Literal` of texts, a `StrEnum`, `X | None`, `tuple[X, ...]`,
`tuple[X, Y]`, `dict[str, X]` and dataclasses of those. Types are exact: neither `true` nor `1.0` is an
integer, and no number is infinite or NaN.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
from collections.abc import Callable
from enum import StrEnum
from functools import cache
from typing import Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

LARGEST_INTEGER = 1 << 62
LARGEST_NUMBER = 1e300
_LONGEST_SHOWN = 40

Result = TypeVar("Result")
Decoder = Callable[[Any], Any]


class Malformed(Exception):
    """A value is not what it should be: what was expected, and the path to it, such as `ops[12].phase`."""

    def __init__(self, what: str, path: str = "") -> None:
        """The path is empty for the outermost value."""
        super().__init__(f"{path}: {what}" if path else what)
        self.what = what
        self.path = path

    def inside(self, step: str) -> Malformed:
        """Return the same about a value that is inside another, at `name` or `[3]`."""
        dot = "." if self.path and not self.path.startswith("[") else ""
        return Malformed(self.what, f"{step}{dot}{self.path}")


def parse_json(text: str | bytes) -> Any:
    """Parse JSON and nothing more: Python would read NaN and Infinity as well."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise Malformed("truncated or not JSON") from None


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def decode(
    kind: type[Result], value: Any, *, rows: bool = False, defaults: bool = False, surplus: bool = False
) -> Result:
    """Return the value as an instance of `kind`, or raise `Malformed`.

    A dataclass is an object with its fields, all of them and no others, unless fields with a default may be
    left out (`defaults`), or others may be there, which are ignored (`surplus`). With `rows`, it may also be
    a list of its fields' values, in their order, as `encode` writes it.
    """
    decoder: Callable[[Any], Result] = _decoder(cast(Any, kind), rows, defaults, surplus)
    return decoder(value)


def encode(value: Any) -> Any:
    """Return dataclasses and tuples as lists: what `decode` reads, in few bytes."""
    if dataclasses.is_dataclass(value):
        return [encode(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [encode(item) for item in value] if isinstance(value, tuple) else value


def expected(what: str, found: Any) -> Malformed:
    """Return the error for a value that is something else; of long values only the beginning is shown."""
    if isinstance(found, list | dict):
        shown = "a list" if isinstance(found, list) else "an object"
    else:
        shown = json.dumps(found) if found is None or isinstance(found, bool) else repr(found)
    cut = shown if len(shown) <= _LONGEST_SHOWN else shown[:_LONGEST_SHOWN] + "..."
    return Malformed(f"expected {what}, found {cut}")


@cache
def _decoder(kind: Any, *rules: bool) -> Decoder:
    """Return the function that decodes values of a type: made once, called for each value."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        present = _decoder(next(option for option in inner if option is not types.NoneType), *rules)
        return lambda value: None if value is None else present(value)
    if origin is Literal:
        return _one_of(inner)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _member(kind)
    if origin is dict:
        return _mapping(_decoder(inner[1], *rules))
    if origin is tuple and inner[-1] is Ellipsis:
        return _integers if inner[0] is int else _sequence(_decoder(inner[0], *rules))
    if origin is tuple:
        return _row(lambda *values: values, {f"[{n}]": _decoder(one, *rules) for n, one in enumerate(inner)})
    return _record(kind, *rules)


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise expected("a whole number", value)
    if not -LARGEST_INTEGER <= value <= LARGEST_INTEGER:
        raise expected("at most 62 bits", value)
    return value


def _number(value: Any) -> float:
    # NaN fails the comparison.
    if type(value) not in (int, float) or not -LARGEST_NUMBER < value < LARGEST_NUMBER:
        raise expected("a finite number", value)
    return float(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise expected("true or false", value)
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise expected("text", value)
    return value


_PLAIN: dict[Any, Decoder] = {int: _integer, float: _number, bool: _flag, str: _text}


def _one_of(options: tuple[str, ...]) -> Decoder:
    def decode_choice(value: Any) -> str:
        if type(value) is not str or value not in options:
            raise expected(f"one of {', '.join(options)}", value)
        return value

    return decode_choice


def _member(kind: type[StrEnum]) -> Decoder:
    members = {member.value: member for member in kind}
    choice = _one_of(tuple(members))
    return lambda value: members[choice(value)]


def _mapping(inner: Decoder) -> Decoder:
    def decode_mapping(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise expected("an object", value)
        return {name: _at(_shown_key(name), inner, item) for name, item in value.items()}

    return decode_mapping


def _sequence(inner: Decoder) -> Decoder:
    def decode_sequence(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise expected("a list", value)
        try:
            return tuple(map(inner, value))
        except Malformed:  # only now it matters which
            return tuple([_at(f"[{number}]", inner, item) for number, item in enumerate(value)])

    return decode_sequence


_each_integer: Callable[[Any], tuple[int, ...]] = _sequence(_integer)


def _integers(value: Any) -> tuple[int, ...]:
    """Decode a list of integers without a call for each: traces have hundreds of thousands."""
    if type(value) is list:
        if not value:
            return ()
        if {*map(type, value)} == {int} and min(value) >= -LARGEST_INTEGER and max(value) <= LARGEST_INTEGER:
            return tuple(value)
    return _each_integer(value)


def _at(step: str, inner: Decoder, value: Any) -> Any:
    try:
        return inner(value)
    except Malformed as error:
        raise error.inside(step) from None


def _row(make: Callable[..., Any], decoders: dict[str, Decoder]) -> Decoder:
    """Decode a list that has one value for each step."""
    steps = list(decoders.items())
    functions = list(decoders.values())

    def decode_row(value: Any) -> Any:
        if type(value) is not list:
            raise expected("a list", value)
        if len(value) != len(functions):
            raise Malformed(f"expected {len(functions)} values, found {len(value)}")
        try:
            return make(*[function(item) for function, item in zip(functions, value)])
        except Malformed:
            return make(*[_at(step, inner, item) for (step, inner), item in zip(steps, value)])

    return decode_row


def _record(kind: Any, rows: bool, defaults: bool, surplus: bool) -> Decoder:
    hints, listed = get_type_hints(kind), dataclasses.fields(kind)
    fields = {field.name: _decoder(hints[field.name], rows, defaults, surplus) for field in listed}
    without_default = [f.name for f in listed if f.default is f.default_factory is dataclasses.MISSING]
    needed = without_default if defaults else fields
    decode_row = _row(kind, fields)

    def decode_record(value: Any) -> Any:
        if rows and type(value) is list:
            return decode_row(value)
        if type(value) is not dict:
            raise expected("an object", value)
        for name in needed:
            if name not in value:
                raise Malformed(f"the field {name!r} is missing")
        for name in () if surplus else value:
            if name not in fields:
                raise _unknown_field(name, list(fields))
        return kind(
            **{name: _at(name, inner, value[name]) for name, inner in fields.items() if name in value}
        )

    return decode_record


def _unknown_field(name: str, fields: list[str]) -> Malformed:
    close = difflib.get_close_matches(name, fields, n=1)
    meant = f"did you mean {close[0]!r}?" if close else f"they are {', '.join(fields)}"
    return Malformed(f"there is no field {_shown_key(name)} ({meant})")


def _shown_key(name: str) -> str:
    return name if name.isidentifier() and len(name) <= _LONGEST_SHOWN else repr(name[:_LONGEST_SHOWN])
