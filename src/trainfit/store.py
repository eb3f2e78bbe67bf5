"""Traces on disk: JSON with a schema number and a content hash, compressed when large, never executed.

A file is `{"format": "trainfit-trace", "schema": 4, "sha256": ..., "trace": {...}}`. Records are lists in
the order of their dataclass's fields. Reading checks the type of every value, the hash, and the trace's own
invariants; whatever is wrong, the reader raises one `FileFormatError`.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import tempfile
import types
import zlib
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from trainfit.errors import FileFormatError
from trainfit.trace import Trace
from trainfit.trace_check import BrokenTrace

FORMAT = "trainfit-trace"
SCHEMA = 4
COMPRESS_ABOVE_BYTES = 1 << 20
LARGEST_FILE_BYTES = 4 << 30
"""Refuse to unpack more than this: a small file can claim to hold a huge one."""
_LARGEST_INTEGER = 1 << 62
_GZIP_MAGIC = b"\x1f\x8b"


def content_hash(trace: Trace) -> str:
    """Return the SHA-256 of the trace's content."""
    return hashlib.sha256(_content(trace)).hexdigest()


def operators_hash(trace: Trace) -> str:
    """Return a hash of what a step runs: its operators in order, with the shapes and dtypes of their results.

    What a trace says beside that (its target's name, assumptions, measured workspaces) may be another.
    """
    kinds = [json.dumps([s.name, [[spec.dtype, spec.shape] for spec in s.outputs]]) for s in trace.signatures]
    found = hashlib.sha256(trace.device.encode())
    for op in trace.ops:
        found.update(kinds[op.signature].encode())
    return found.hexdigest()


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write the trace, whole or not at all; gzip-compressed when it is large."""
    content = _content(trace)
    digest = hashlib.sha256(content).hexdigest()
    head = json.dumps({"format": FORMAT, "schema": SCHEMA, "sha256": digest})
    data = head[:-1].encode() + b', "trace": ' + content + b"}\n"
    if len(data) > COMPRESS_ABOVE_BYTES:
        data = gzip.compress(data, compresslevel=6, mtime=0)
    write_whole(Path(path), data)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that, whatever happens, either all of it is there or what was there before.

    A link stays a link, and a device or a pipe (`/dev/null`) is written to, not replaced.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)
            return
        folder, name = os.path.split(os.path.realpath(path))
        # The name is cut so that the temporary file's name does not become too long.
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name[:40]}.")
    except (OSError, ValueError) as error:
        raise FileFormatError(f"cannot write {path}: {_reason(error)}.") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, os.path.join(folder, name))
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise FileFormatError(f"cannot write {path}: {_reason(error)}.") from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _reason(error: OSError | ValueError) -> str:
    """Say why a file cannot be read or written; a ValueError is about a name that no file can have."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _umask() -> int:
    """Return the user's mask for new files, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def load_trace(path: str | Path) -> Trace:
    """Read a trace that `save_trace` wrote; anything else is one clear error."""
    document = _parse(Path(path))
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FileFormatError(f"{path} is not a trainfit trace.")
    schema = document.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        named = f"schema {schema}" if type(schema) is int and abs(schema) < 10**9 else "an unknown schema"
        raise FileFormatError(
            f"{path} has {named}, but this trainfit reads schema {SCHEMA}; capture the step again."
        )
    content = document.get("trace")
    if _digest(content) != document.get("sha256"):
        raise FileFormatError(f"{path} is damaged: its content does not match its hash.")
    try:
        trace = _decode(Trace, content, "trace")
        assert isinstance(trace, Trace)
        trace.check()
    except BrokenTrace as error:
        raise FileFormatError(f"{path} is not a valid trace: {error}.") from None
    except _Malformed as error:
        raise FileFormatError(f"{path} is not a valid trace: {error}.") from None
    return trace


def _content(trace: Trace) -> bytes:
    return _canonical(_encode(trace))


def _canonical(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=True).encode()


def _digest(content: Any) -> str:
    """Return the hash of what a file holds; empty if that is nested too deeply to be a trace."""
    try:
        return hashlib.sha256(_canonical(content)).hexdigest()
    except RecursionError:
        return ""


def _parse(path: Path) -> Any:
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise FileFormatError(f"cannot read {path}: {_reason(error)}.") from None
    if data.startswith(_GZIP_MAGIC):
        data = _unpack(path, data)
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise FileFormatError(f"{path} is truncated or not JSON.") from None


def _unpack(path: Path, data: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacker.decompress(data, LARGEST_FILE_BYTES)
    except zlib.error:
        raise FileFormatError(f"{path} is damaged: it cannot be decompressed.") from None
    if unpacker.unconsumed_tail:
        raise FileFormatError(
            f"{path} unpacks to more than {LARGEST_FILE_BYTES >> 30} GiB; that is no trace."
        )
    if not unpacker.eof:
        raise FileFormatError(f"{path} is truncated.")
    if unpacker.unused_data:
        raise FileFormatError(f"{path} is damaged: something follows the compressed trace.")
    return unpacked


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


class _Malformed(Exception):
    """A value in the file is not of the type it should be."""


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        row = [_encode(getattr(value, field.name)) for field in dataclasses.fields(value)]
        return dict(zip(_names(type(value)), row)) if isinstance(value, Trace) else row
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


@cache
def _fields(kind: Any) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind)
    return tuple((name, hints[name]) for name in _names(kind))


def _decode(hint: Any, value: Any, where: str) -> Any:
    """Turn JSON into the type that `hint` names, or say where it is something else."""
    if hint is int:
        if type(value) is not int or abs(value) > _LARGEST_INTEGER:
            raise _Malformed(f"{where} should be an integer of at most 62 bits")
        return value
    if hint is str or hint is bool:
        if type(value) is not hint:
            raise _Malformed(f"{where} should be of type {hint.__name__}")
        return value
    if get_origin(hint) is types.UnionType:
        inner = next(option for option in get_args(hint) if option is not type(None))
        return None if value is None else _decode(inner, value, where)
    if get_origin(hint) is tuple:
        return _decode_tuple(get_args(hint), value, where)
    return _decode_record(hint, value, where)


def _decode_tuple(items: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if type(value) is not list:
        raise _Malformed(f"{where} should be a list")
    if items[-1] is Ellipsis:
        return tuple([_decode(items[0], item, where) for item in value])
    if len(value) != len(items):
        raise _Malformed(f"{where} should have {len(items)} entries")
    return tuple([_decode(hint, item, where) for hint, item in zip(items, value)])


def _decode_record(kind: Any, value: Any, where: str) -> Any:
    fields = _fields(kind)
    if kind is Trace:
        if type(value) is not dict or set(value) != {name for name, _ in fields}:
            raise _Malformed("the trace should have exactly the parts " + ", ".join(_names(Trace)))
        value = [value[name] for name, _ in fields]
    if type(value) is not list or len(value) != len(fields):
        raise _Malformed(f"each entry of {where} should have {len(fields)} values")
    return kind(*[_decode(hint, item, name) for (name, hint), item in zip(fields, value)])
