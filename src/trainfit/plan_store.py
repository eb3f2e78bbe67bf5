"""Plans on disk: JSON with a schema number and a content hash, never executed.

A file is `{"format": "trainfit-plan", "schema": 3, "sha256": ..., "plan": {...}}`. People look into plans, so
records have their fields' names, and ops one line each. Reading checks the type of every value, the hash and
that the parts fit together; whatever is wrong, the reader raises one `FileFormatError`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from trainfit.errors import FileFormatError
from trainfit.plans import DECISIONS, Plan
from trainfit.settings import is_sound
from trainfit.store import write_whole

FORMAT = "trainfit-plan"
SCHEMA = 3
LARGEST_FILE_BYTES = 1 << 30
_LARGEST_INTEGER = 1 << 62


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan, whole or not at all."""
    content = dataclasses.asdict(plan)
    head = {"format": FORMAT, "schema": SCHEMA, "sha256": _digest(content)}
    write_whole(Path(path), (_pretty({**head, "plan": content}) + "\n").encode())


def load_plan(path: str | Path) -> Plan:
    """Read a plan that `save_plan` wrote; anything else is one clear error."""
    document = _parse(Path(path))
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FileFormatError(f"{path} is not a trainfit plan.")
    schema = document.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        named = f"schema {schema}" if type(schema) is int and abs(schema) < 10**9 else "an unknown schema"
        raise FileFormatError(
            f"{path} has {named}, but this trainfit reads schema {SCHEMA}; make it again with trainfit plan."
        )
    content = document.get("plan")
    if _digest(content) != document.get("sha256"):
        raise FileFormatError(f"{path} is damaged: its content does not match its hash.")
    try:
        plan = _decode(Plan, content, "plan")
        assert isinstance(plan, Plan)
        _check(plan)
    except _Malformed as error:
        raise FileFormatError(f"{path} is not a valid plan: {error}.") from None
    return plan


def _parse(path: Path) -> Any:
    try:
        if path.is_file() and path.stat().st_size > LARGEST_FILE_BYTES:
            raise FileFormatError(f"{path} is larger than {LARGEST_FILE_BYTES >> 30} GiB; that is no plan.")
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise FileFormatError(f"cannot read {path}: {reason}.") from None
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise FileFormatError(f"{path} is truncated or not JSON.") from None


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _digest(content: Any) -> str:
    """Return the hash of a plan's content; empty if that is nested too deeply to be a plan."""
    try:
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=True, sort_keys=True)
    except RecursionError:
        return ""
    return hashlib.sha256(text.encode()).hexdigest()


def _pretty(value: Any, indent: int = 0) -> str:
    """Write JSON so that a person can read it: what is short stays on one line."""
    short = json.dumps(value, ensure_ascii=True)
    if len(short) + indent <= 110 or not isinstance(value, dict | list | tuple):
        return short
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {_pretty(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(inner + row for row in rows) + "\n" + " " * indent + "}"
    rows = [_pretty(item, indent + 1) for item in value]
    return "[\n" + ",\n".join(inner + row for row in rows) + "\n" + " " * indent + "]"


class _Malformed(Exception):
    """A value in the file is not what it should be."""


@cache
def _fields(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _decode(hint: Any, value: Any, where: str) -> Any:
    """Turn JSON into the type that `hint` names, or say where it is something else."""
    if hint is int:
        if type(value) is not int or abs(value) > _LARGEST_INTEGER:
            raise _Malformed(f"{where} should be an integer of at most 62 bits")
        return value
    if hint is float:
        if type(value) not in (int, float) or not math.isfinite(value):
            raise _Malformed(f"{where} should be a finite number")
        return float(value)
    if hint is str or hint is bool:
        if type(value) is not hint:
            raise _Malformed(f"{where} should be of type {hint.__name__}")
        return value
    if get_origin(hint) is types.UnionType:
        inner = next(option for option in get_args(hint) if option is not type(None))
        return None if value is None else _decode(inner, value, where)
    if get_origin(hint) is tuple:
        if type(value) is not list:
            raise _Malformed(f"{where} should be a list")
        kinds = get_args(hint)
        if kinds[-1] is Ellipsis:
            return tuple([_decode(kinds[0], item, where) for item in value])
        if len(value) != len(kinds):
            raise _Malformed(f"{where} should have {len(kinds)} entries")
        return tuple([_decode(kind, item, where) for kind, item in zip(kinds, value)])
    fields = _fields(hint)
    if type(value) is not dict or set(value) != set(fields):
        raise _Malformed(f"{where} should have exactly the parts " + ", ".join(fields))
    return hint(**{name: _decode(kind, value[name], f"{where}.{name}") for name, kind in fields.items()})


def _check(plan: Plan) -> None:
    """Check that the parts of a plan fit together."""
    if not is_sound(plan.settings):
        raise _Malformed(
            "plan.settings should have counts from zero on, sizes above, and values as JSON text"
        )
    for number, kind in enumerate(plan.kinds):
        for op in kind.ops:
            if op.decision not in DECISIONS:
                raise _Malformed(
                    f"{op.name} of kind {number} is to be {op.decision!r}, not one of " + ", ".join(DECISIONS)
                )
    seen: set[tuple[str, int]] = set()
    for region in plan.regions:
        if not 0 <= region.kind < len(plan.kinds):
            raise _Malformed(f"region {region.module} is of kind {region.kind}, of {len(plan.kinds)}")
        if region.call < 0 or (region.module, region.call) in seen:
            raise _Malformed(f"call {region.call} of {region.module} is there twice or negative")
        seen.add((region.module, region.call))
        if region.whole and (region.kept_bytes or region.continues):
            raise _Malformed(f"region {region.module} is computed again as a whole, but not all of it")
