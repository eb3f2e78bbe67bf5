"""Files that the step opens by itself, and what it opens them for.

A file that was there before is not written to: a copy of it is (`elsewhere.py`). What `run` writes in binary
goes to a copy even if the file is new: there are more ways to write the bytes of a tensor than anyone can
list. Text that is appended is written as usual, as are new files that are text or that building the step
makes (downloads).
"""

from __future__ import annotations

import builtins
import contextlib
import dbm.dumb
import functools
import inspect
import io
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy
import torch

from trainfit.capturing.disk.elsewhere import exists, followed, is_ordinary
from trainfit.capturing.disk.pretended import missing, path_of
from trainfit.capturing.replacing import replaced

if TYPE_CHECKING:
    from trainfit.capturing.disk.pretended import Disk, Instead

_access, _os_open = os.access, os.open


@contextlib.contextmanager
def careful_databases(disk: Disk) -> Iterator[None]:
    """Let a database of Python's own (`shelve`) append to a copy of its index.

    What it appends is text that belongs to binary data, which goes to a copy.
    """

    def careful_io(module: Any) -> Any:
        def careful_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            path = path_of(file)
            if path is not None and "a" in mode and disk.in_capture:
                place_to_open(disk, path, "ab", file)
            return module.open(file, mode, *args, **kwargs)

        return SimpleNamespace(open=careful_open)

    with replaced(dbm.dumb, "_io", careful_io):
        yield


def _open(disk: Disk, original: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    path = path_of(file) if isinstance(file, str | bytes | os.PathLike) else None
    if path is None or not isinstance(mode, str):
        return NotImplemented
    if "r" in mode and path in disk.files:
        if mode in ("rb", "br"):
            return io.BufferedReader(_Unwritten(disk, path))
        raise disk.refused(path)
    place = place_to_open(disk, path, mode, file)
    if place is None:
        return NotImplemented
    given = inspect.signature(original).bind(file, mode, *args, **kwargs)
    opener = given.arguments.get("opener") or functools.partial(_os_open, mode=0o666)
    given.arguments["opener"] = lambda _, flags: opener(place, flags)
    return original(*given.args, **given.kwargs)


def _open_number(disk: Disk, original: Any, path: Any, flags: int, mode: int = 0o777) -> Any:
    found = path_of(path) if isinstance(path, str | bytes | os.PathLike) else None
    if found is None:
        return NotImplemented
    in_place = disk.elsewhere.real(found) == found
    if flags & os.O_DIRECTORY or (flags & os.O_EXCL and in_place):
        return original(disk.place(found, path), flags, mode)
    if not flags & (os.O_WRONLY | os.O_RDWR):
        kind = "rb"
    elif flags & os.O_EXCL:
        kind = "xb"
    elif flags & os.O_TRUNC and not flags & os.O_APPEND:
        kind = "wb"
    else:
        kind = "ab" if flags & os.O_CREAT else "r+b"
    if "r" in kind and found in disk.files:
        raise disk.refused(found)
    return original(place_to_open(disk, found, kind, path) or path, flags, mode)


def place_to_open(disk: Disk, path: str, mode: str, given: Any) -> str | None:
    """Return where a file is to be opened; None if in its place."""
    place = disk.elsewhere.real(path)
    there = place is not None and exists(place)
    if not there and not os.path.isdir(os.path.dirname(path)):
        raise missing(given)
    if not any(sign in mode for sign in "wax+") or (place is None and "r" in mode):
        place = disk.place(path, given)
        return None if place == path else place
    in_place = place == path
    appends_text = "a" in mode and "b" not in mode
    as_usual = there and ("x" in mode or (appends_text and in_place))
    if place is not None and (as_usual or _fails(place, mode, there=there)):
        return None if in_place else place
    older = place is None or disk.is_older(followed(place))
    binary_of_run = "b" in mode and not disk.is_building
    if in_place and not older and not binary_of_run:
        disk.made.append(path)
        disk.files.pop(path, None)
        return None
    if in_place or place is None:
        disk.note_opening(path)
    disk.files.pop(path, None)
    return disk.elsewhere.own_copy(path, with_content="w" not in mode)


def _fails(path: str, mode: str, *, there: bool) -> bool:
    """Whether to open it as usual, because that will fail or it is not an ordinary file."""
    if not is_ordinary(path) or (not there and "r" in mode):
        return True
    return not _access(path if exists(path) else os.path.dirname(path), os.W_OK)


def _truncate(disk: Disk, original: Any, path: Any, length: int) -> Any:
    found = path_of(path)
    if found is None:
        return NotImplemented
    if found in disk.files:
        raise disk.refused(found)
    return original(place_to_open(disk, found, "r+b", path) or path, length)


class _Unwritten(io.RawIOBase):
    """A file that a capture did not write: `torch.load` knows it by its name, nothing else can read it."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.name = path
        self._disk = disk

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        raise self._disk.refused(self.name)


def _share(
    disk: Disk, original: Any, filename: str, shared: bool | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Let `torch.from_file(shared=True)` share a copy."""
    if not shared:
        return NotImplemented
    place = place_to_open(disk, path_of(filename) or "", "ab", filename)
    return original(place or filename, shared, *args, **kwargs)


def _map(disk: Disk, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Let memory-mapped arrays change in memory only: numpy opens them for writing by default."""
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    path = path_of(given.arguments["filename"])
    writes = given.arguments["mode"] in ("r+", "readwrite")
    if writes and path is not None and disk.elsewhere.real(path) == path:
        given.arguments["mode"] = "c"
        # Where the file would have to grow, a copy of it does.
        with contextlib.suppress(ValueError):
            return original(*given.args, **given.kwargs)
    return NotImplemented


def _flush(disk: Disk, original: Any, array: Any) -> Any:
    if array.mode == "c":
        disk.note("numpy.memmap.flush")
    return NotImplemented


INSTEAD: Instead = {
    (builtins, "open"): _open,
    (io, "open"): _open,
    (os, "open"): _open_number,
    (os, "truncate"): _truncate,
    (torch, "from_file"): _share,
    (numpy.memmap, "__new__"): _map,
    (numpy.memmap, "flush"): _flush,
}
