"""Files that the step opens by itself, and what it opens them for.

A file that was there before is not written to but its copy is (`elsewhere.py`). So is what `run` writes in
binary, new files too: there are more ways to write the bytes of a tensor than anyone can list. Text that is
appended is written as usual, as are new files that are text or that building the step makes (downloads).
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy
import torch

from trainfit.capturing.disk.elsewhere import exists, followed, is_ordinary
from trainfit.capturing.disk.pretended import path_of
from trainfit.capturing.replacing import replaced
from trainfit.capturing.values import script_line
from trainfit.errors import CaptureError

if TYPE_CHECKING:
    from trainfit.capturing.disk.pretended import Disk

Opener = Callable[[Any, int], int]
_os_open = os.open


@contextlib.contextmanager
def careful_opening(disk: Disk) -> Iterator[None]:
    """Open files in this way for the length of a capture."""
    with contextlib.ExitStack() as stack:
        for owner in (builtins, io):
            stack.enter_context(replaced(owner, "open", lambda original: _open(disk, original)))
        stack.enter_context(replaced(os, "open", lambda original: _open_number(disk, original)))
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
        if mode in ("rb", "br") and path in disk.files:
            return io.BufferedReader(_Unwritten(disk, path))
        place = _place(disk, path, mode)
        if place is None:
            return usual(opener)
        return usual(lambda _, flags: opener(place, flags) if opener else _os_open(place, flags, 0o666))

    return careful_open


def _open_number(disk: Disk, original: Any) -> Any:
    def careful_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        found = path_of(path) if dir_fd is None and isinstance(path, str | bytes | os.PathLike) else None
        if found is None or flags & (os.O_EXCL | os.O_DIRECTORY) or not disk.in_capture:
            return original(path, flags, mode, dir_fd=dir_fd)  # type: ignore[no-any-return]
        if not flags & (os.O_WRONLY | os.O_RDWR):
            kind = "rb"
        elif flags & os.O_APPEND:
            kind = "ab" if flags & os.O_CREAT else "r+b"
        else:
            kind = "wb" if flags & os.O_TRUNC else "ab" if flags & os.O_CREAT else "r+b"
        return original(_place(disk, found, kind) or path, flags, mode)  # type: ignore[no-any-return]

    return careful_open


def _place(disk: Disk, path: str, mode: str) -> str | None:
    """Return where a file is to be opened; None if in its place."""
    place = disk.elsewhere.place(path)
    if not any(sign in mode for sign in "wax+"):
        return place
    there = place is not None or (exists(path) and path not in disk.gone)
    appends_text = "a" in mode and "b" not in mode
    as_usual = there and ("x" in mode or (appends_text and place is None))
    if as_usual or _fails(path, mode, there=there):
        return place
    older = path in disk.gone or disk.is_older(followed(path))
    binary_of_run = "b" in mode and not disk.is_building
    if place is None and not older and not binary_of_run:
        disk.made.append(path)
        return None
    if place is None:
        disk.note_opening(path, older=older)
    keep = "w" not in mode and path not in disk.gone
    disk.wrote(path)
    return disk.elsewhere.own_copy(path, with_content=keep)


def _fails(path: str, mode: str, *, there: bool) -> bool:
    """Whether opening is going to fail, or is of something that is no ordinary file: as it always does."""
    folder = os.path.dirname(path)
    if not is_ordinary(path) or not os.path.isdir(folder) or (not there and "r" in mode):
        return True
    return not os.access(path if exists(path) else folder, os.W_OK)


class _Unwritten(io.RawIOBase):
    """A file that a capture did not write: `torch.load` knows it by its name, nobody can read it."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.name = path
        self._disk = disk

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        raise CaptureError(self._disk.refusal(self.name, script_line()))


def _shared(disk: Disk, original: Any) -> Any:
    """Let `torch.from_file(shared=True)` share a copy."""

    def from_file(filename: str, shared: bool | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        if shared and disk.in_capture:
            filename = _place(disk, os.path.abspath(filename), "ab") or filename
        tensor: torch.Tensor = original(filename, shared, *args, **kwargs)
        return tensor

    return from_file


def _map(disk: Disk, original: Any) -> Any:
    """Let arrays in files be changed in memory only: numpy opens them to be changed unless told otherwise."""

    def mapped(
        subtype: Any, filename: Any, dtype: Any = numpy.uint8, mode: str = "r+", *args: Any, **kwargs: Any
    ) -> Any:
        path = path_of(filename)
        if (
            mode in ("r+", "readwrite")
            and path is not None
            and disk.in_capture
            and path not in disk.elsewhere
        ):
            # Where the file would have to grow, a copy of it does.
            with contextlib.suppress(ValueError):
                return original(subtype, filename, dtype, "c", *args, **kwargs)
        return original(subtype, filename, dtype, mode, *args, **kwargs)

    return mapped


def _flush(disk: Disk, original: Any) -> Any:
    def flush(self: Any) -> None:
        if disk.in_capture and self.mode == "c":
            disk.note("numpy.memmap.flush was skipped: a capture changes no file that was there before")
        original(self)

    return flush
