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
import io
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy
import torch

from trainfit.capturing.disk.elsewhere import exists, followed, is_ordinary
from trainfit.capturing.disk.pretended import missing, path_of
from trainfit.capturing.replacing import replaced

if TYPE_CHECKING:
    from trainfit.capturing.disk.pretended import Disk

Opener = Callable[[Any, int], int]
_access, _os_open = os.access, os.open


@contextlib.contextmanager
def careful_opening(disk: Disk) -> Iterator[None]:
    """Open files in this way for the length of a capture."""
    with contextlib.ExitStack() as stack:
        for owner in (builtins, io):
            stack.enter_context(replaced(owner, "open", lambda original: _open(disk, original)))
        stack.enter_context(replaced(dbm.dumb, "_io", lambda original: _OfADatabase(disk, original)))
        stack.enter_context(replaced(os, "open", lambda original: _open_number(disk, original)))
        stack.enter_context(replaced(os, "truncate", lambda original: _truncate(disk, original)))
        stack.enter_context(replaced(torch, "from_file", lambda original: _shared(disk, original)))
        stack.enter_context(replaced(numpy.memmap, "__new__", lambda original: _map(disk, original)))
        stack.enter_context(replaced(numpy.memmap, "flush", lambda original: _flush(disk, original)))
        yield


def _open(disk: Disk, original: Any) -> Any:
    def careful_open(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Opener | None = None,
    ) -> Any:
        def usual(opener: Opener | None) -> Any:
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)

        path = path_of(file) if isinstance(file, str | bytes | os.PathLike) else None
        if path is None or not isinstance(mode, str) or not disk.in_capture:
            return usual(opener)
        if "r" in mode and path in disk.files:
            if mode in ("rb", "br"):
                return io.BufferedReader(_Unwritten(disk, path))
            raise disk.refused(path)
        place = place_to_open(disk, path, mode, file)
        if place is None:
            return usual(opener)
        return usual(lambda _, flags: opener(place, flags) if opener else _os_open(place, flags, 0o666))

    return careful_open


def _open_number(disk: Disk, original: Any) -> Any:
    def careful_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        found = path_of(path) if dir_fd is None and isinstance(path, str | bytes | os.PathLike) else None
        if found is None or not disk.in_capture:
            return original(path, flags, mode, dir_fd=dir_fd)  # type: ignore[no-any-return]
        in_place = disk.elsewhere.real(found) == found
        if flags & os.O_DIRECTORY or (flags & os.O_EXCL and in_place):
            return original(disk.place(found, path), flags, mode)  # type: ignore[no-any-return]
        if not flags & (os.O_WRONLY | os.O_RDWR):
            kind = "rb"
        elif flags & os.O_EXCL:
            kind = "xb"
        elif flags & os.O_APPEND:
            kind = "ab" if flags & os.O_CREAT else "r+b"
        else:
            kind = "wb" if flags & os.O_TRUNC else "ab" if flags & os.O_CREAT else "r+b"
        if "r" in kind and found in disk.files:
            raise disk.refused(found)
        return original(place_to_open(disk, found, kind, path) or path, flags, mode)  # type: ignore[no-any-return]

    return careful_open


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


class _OfADatabase:
    """The module `io` for a database of Python's own (`shelve`), which appends text to its index.

    That text belongs to binary data, and goes to a copy as that does.
    """

    def __init__(self, disk: Disk, module: Any) -> None:
        self._disk, self._module = disk, module

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        path = path_of(file)
        if path is not None and "a" in mode and self._disk.in_capture:
            place_to_open(self._disk, path, "ab", file)
        return self._module.open(file, mode, *args, **kwargs)


def _truncate(disk: Disk, original: Any) -> Any:
    def truncate(path: Any, length: int) -> None:
        found = None if type(path) is int else path_of(path)
        if found is None or not disk.in_capture:
            original(path, length)
        elif found in disk.files:
            raise disk.refused(found)
        else:
            original(place_to_open(disk, found, "r+b", path) or path, length)

    return truncate


class _Unwritten(io.RawIOBase):
    """A file that a capture did not write: `torch.load` knows it by its name, nothing else can read it."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.name = path
        self._disk = disk

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        raise self._disk.refused(self.name)


def _shared(disk: Disk, original: Any) -> Any:
    """Let `torch.from_file(shared=True)` share a copy."""

    def from_file(filename: str, shared: bool | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        if shared and disk.in_capture:
            filename = place_to_open(disk, path_of(filename) or "", "ab", filename) or filename
        tensor: torch.Tensor = original(filename, shared, *args, **kwargs)
        return tensor

    return from_file


def _map(disk: Disk, original: Any) -> Any:
    """Let memory-mapped arrays change in memory only: numpy opens them for writing by default."""

    def mapped(
        subtype: Any, filename: Any, dtype: Any = numpy.uint8, mode: str = "r+", *args: Any, **kwargs: Any
    ) -> Any:
        path = path_of(filename)
        if (
            mode in ("r+", "readwrite")
            and path is not None
            and disk.in_capture
            and disk.elsewhere.real(path) == path
        ):
            # Where the file would have to grow, a copy of it does.
            with contextlib.suppress(ValueError):
                return original(subtype, filename, dtype, "c", *args, **kwargs)
        return original(subtype, filename, dtype, mode, *args, **kwargs)

    return mapped


def _flush(disk: Disk, original: Any) -> Any:
    def flush(self: Any) -> None:
        if disk.in_capture and self.mode == "c":
            disk.note("numpy.memmap.flush")
        original(self)

    return flush
