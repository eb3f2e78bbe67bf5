"""Traces on disk: JSON with a schema number and a content hash (`sealed_files.py`), compressed when large.

Records are lists in the order of their dataclass's fields. Reading checks the type of every value, the hash,
and the trace's own invariants; whatever is wrong, the reader raises one `FileFormatError`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import fields
from pathlib import Path

from trainfit.basics.decoding import Malformed, decode, encode
from trainfit.basics.sealed_files import FileKind, canonical, write_whole
from trainfit.errors import FileFormatError
from trainfit.traces.trace import Trace
from trainfit.traces.trace_check import BrokenTrace

FILE = FileKind(
    "trace", schema=10, remedy="capture it again: trainfit.save_trace(trainfit.capture(build), path)"
)
COMPRESS_ABOVE_BYTES = 1 << 20


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
    head = json.dumps(FILE.head(content))
    data = head[:-1].encode() + b', "trace": ' + content + b"}\n"
    if len(data) > COMPRESS_ABOVE_BYTES:
        data = gzip.compress(data, compresslevel=6, mtime=0)
    write_whole(Path(path), data)


def load_trace(path: str | Path) -> Trace:
    """Read a trace that `save_trace` wrote; anything else is one clear error."""
    content = FILE.read(Path(path))
    try:
        trace = decode(Trace, content, rows=True)
        trace.check()
    except (Malformed, BrokenTrace) as error:
        raise FileFormatError(f"{path} is not a valid trace: {error}.") from None
    return trace


def _content(trace: Trace) -> bytes:
    """Return the trace as JSON: an object of its parts, whose records are lists."""
    return canonical({field.name: encode(getattr(trace, field.name)) for field in fields(trace)})
