"""Finished rows, kept line by line beside the table while others are still done: a sweep can be continued.

A line is `{"key": ..., "row": {...}}`. One that was cut off when the machine went down is not read, and its
row is done again. Only one sweep at a time writes to a file.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from trainfit.basics.decoding import Malformed, parse_json
from trainfit.basics.sealed_files import reason_of
from trainfit.errors import FileFormatError
from trainfit.sweeping.row_runner import Row

_HEAD = {"format": "trainfit-sweep", "schema": 1}


class StateFile:
    """The state of one sweep; a context, which holds the file."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        """Open or make the file; with `fresh` what is in it is forgotten."""
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except (OSError, ValueError) as error:
            raise FileFormatError(f"cannot write {path}: {reason_of(error)}.") from None
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise FileFormatError(
                    f"another sweep writes to {path} at the moment; wait for it, or name another --output."
                ) from None
            self.rows = self._read(fresh)
        except BaseException:
            os.close(self._file)
            raise

    def _read(self, fresh: bool) -> dict[str, Row]:
        try:
            lines = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise FileFormatError(f"cannot read {self.path}: {reason_of(error)}.") from None
        if lines != [b""] and _parsed(lines[0]) != _HEAD:
            raise FileFormatError(
                f"{self.path} is not the state of a sweep that this trainfit can continue; remove it, or "
                "name another --output."
            )
        if fresh or lines == [b""]:
            os.ftruncate(self._file, 0)
            self._write(_HEAD)
            return {}
        if lines[-1]:  # cut off: what is written next begins a line of its own
            os.write(self._file, b"\n")
        found: dict[str, Row] = {}
        for document in map(_parsed, lines[1:]):
            if isinstance(document, dict):
                key, row = document.get("key"), document.get("row")
                if isinstance(key, str) and isinstance(row, dict):
                    found[key] = row
        return found

    def add(self, key: str, row: Row) -> None:
        """Keep a finished row, so that it is there even if the machine goes down in the next moment."""
        self._write({"key": key, "row": row})

    def _write(self, document: dict[str, Any]) -> None:
        data = json.dumps(document, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            raise FileFormatError(f"cannot write {self.path}: {reason_of(error)}.") from None

    def __enter__(self) -> StateFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        os.close(self._file)


def _parsed(line: bytes) -> Any:
    try:
        return parse_json(line)
    except Malformed:
        return None
