"""Files that are written whole or not at all; JSON files with a schema number and a hash of their content.

A file is `{"format": "trainfit-trace", "schema": 4, "sha256": ..., "trace": {...}}`; large ones may be
compressed. Nothing in a file is ever executed. Whatever is wrong with one, the reader raises one
`FileFormatError`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainfit.basics.decoding import Malformed, parse_json
from trainfit.errors import FileFormatError

LARGEST_FILE_BYTES = 4 << 30
"""Refuse to unpack more than this: a small file can claim to hold a huge one."""
_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class FileKind:
    """A kind of file: what it holds, in which schema, and how a user makes it again."""

    name: str
    schema: int
    remedy: str
    older: tuple[int, ...] = ()
    """Schemas of earlier versions that can still be read; the reader adds what they do not have."""

    @property
    def format(self) -> str:
        """What a file says that it is."""
        return f"trainfit-{self.name}"

    def head(self, content: bytes) -> dict[str, Any]:
        """Return what precedes a content, which is given in its canonical form."""
        return {
            "format": self.format,
            "schema": self.schema,
            "sha256": hashlib.sha256(content).hexdigest(),
        }

    def read(self, path: Path) -> Any:
        """Return the content of a file, whose hash is right; what is in it is not checked here."""
        return self.read_any(path)[0]

    def read_any(self, path: Path) -> tuple[Any, int]:
        """Return the content of a file, and the schema that it has."""
        document = read_json(path)
        if not isinstance(document, dict) or document.get("format") != self.format:
            raise FileFormatError(f"{path} is not a trainfit {self.name}.")
        schema = document.get("schema")
        if type(schema) is not int or schema not in (self.schema, *self.older):
            named = f"schema {schema}" if type(schema) is int and abs(schema) < 10**9 else "an unknown schema"
            raise FileFormatError(
                f"{path} has {named}, but this trainfit reads schema {self.schema}; {self.remedy}."
            )
        content = document.get(self.name)
        try:
            digest = hashlib.sha256(canonical(content)).hexdigest()
        except RecursionError:
            digest = ""  # nested too deeply to be one of ours
        if digest != document.get("sha256"):
            raise FileFormatError(f"{path} is damaged: its content does not match its hash.")
        return content, schema


def canonical(content: Any) -> bytes:
    """Return JSON in the form whose hash counts: the same for objects whose keys are in another order."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=True, sort_keys=True).encode()


def read_json(path: Path) -> Any:
    """Parse a JSON file, compressed or not."""
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        raise FileFormatError(f"cannot read {path}: {reason_of(error)}.") from None
    if data.startswith(_GZIP_MAGIC):
        data = _unpack(path, data)
    try:
        return parse_json(data)
    except Malformed as error:
        raise FileFormatError(f"{path} is {error}.") from None


def _unpack(path: Path, data: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacker.decompress(data, LARGEST_FILE_BYTES)
    except zlib.error:
        raise FileFormatError(f"{path} is damaged: it cannot be decompressed.") from None
    if unpacker.unconsumed_tail:
        raise FileFormatError(f"{path} unpacks to more than {LARGEST_FILE_BYTES >> 30} GiB; it is not ours.")
    if not unpacker.eof:
        raise FileFormatError(f"{path} is truncated.")
    if unpacker.unused_data:
        raise FileFormatError(f"{path} is damaged: something follows the compressed content.")
    return unpacked


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
        raise FileFormatError(f"cannot write {path}: {reason_of(error)}.") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        mask = os.umask(0)  # the user's, for new files: it can only be read by setting it
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, os.path.join(folder, name))
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise FileFormatError(f"cannot write {path}: {reason_of(error)}.") from None
        raise


def reason_of(error: OSError | ValueError) -> str:
    """Say why a file cannot be read or written; a ValueError is about a name that no file can have."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
