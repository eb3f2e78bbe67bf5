"""Where the content of a file is while a capture runs: in its place, or in a temporary folder.

What a step writes while it is captured is made of tensors without memory, whatever library writes it. So a
file that was there before keeps its content: the step writes to a copy, and reads from it. The folder with
the copies is gone when the capture ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile

from trainfit.errors import CaptureError
from trainfit.units import format_bytes

LARGEST_COPY = 1 << 30
"""Bytes of a file that is copied so that the step can change the copy."""
_MOST_LINKS = 40
_SYSTEM_FOLDERS = ("/dev/", "/proc/", "/sys/")
_lstat, _stat, _open = os.lstat, os.stat, open


class Elsewhere:
    """The files whose content is not in their place."""

    def __init__(self) -> None:
        """Begin with every file in its place."""
        self._places: dict[str, str] = {}
        """Of a path: where its content is. That of a renamed file is under its old name."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __bool__(self) -> bool:
        """Whether any content is elsewhere."""
        return bool(self._places)

    def __contains__(self, path: str) -> bool:
        """Whether the content of a path is elsewhere."""
        return self.place(path) is not None

    def place(self, path: str) -> str | None:
        """Return where the content of a path is, if it is elsewhere; also of a path in a renamed folder."""
        if not self._places:
            return None
        for name in (path, followed(path)):
            rest = ""
            while name not in self._places:
                name, _, last = name.rpartition(os.sep)
                rest = os.sep + last + rest
                if not name:
                    break
            else:
                return self._places[name] + rest
        return None

    def put(self, path: str, place: str) -> None:
        """From now on, the content of a path is in that place."""
        self._places[path] = place

    def forget(self, path: str) -> str | None:
        """From now on, a path has no content elsewhere; return where it was."""
        return self._places.pop(path, None) or self._places.pop(followed(path), None)

    def own_copy(self, path: str, *, with_content: bool) -> str:
        """Give a path a copy that may be written to, with the content that it has now or without."""
        source = self.place(path)
        if source is not None and self._folder is not None and source.startswith(self._folder.name + os.sep):
            return source
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="trainfit-")
        number = len(os.listdir(self._folder.name))
        copy = os.path.join(self._folder.name, str(number), os.path.basename(path))
        os.mkdir(os.path.dirname(copy))
        if with_content and exists(source or path):
            _refuse_large(path, source or path)
            with _open(source or path, "rb") as old, _open(copy, "wb") as new:
                shutil.copyfileobj(old, new)
        self._places[followed(path)] = copy
        return copy

    def end(self) -> None:
        """Remove all copies."""
        self._places.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _refuse_large(path: str, source: str) -> None:
    size = _stat(source).st_size
    if size > LARGEST_COPY:
        raise CaptureError(
            f"the step opens {path} ({format_bytes(size)}) to change it. A capture changes no file that was "
            f"there before, and copies none above {format_bytes(LARGEST_COPY)}: open it for reading, or "
            "leave it out of the step that is captured."
        )


def followed(path: str) -> str:
    """Return what a path leads to, if it is a link. (`os.path.realpath` would ask functions that ask us.)"""
    with contextlib.suppress(OSError):
        for _ in range(_MOST_LINKS):
            path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    return path


def exists(path: str) -> bool:
    """Whether there is something on the real disk, if only a link that leads nowhere."""
    try:
        _lstat(path)
    except OSError:
        return False
    return True


def is_ordinary(path: str) -> bool:
    """Whether a path is, or would be, an ordinary file: no device, pipe, folder or file of the system."""
    try:
        return stat.S_ISREG(_stat(path).st_mode) and not path.startswith(_SYSTEM_FOLDERS)
    except OSError:
        return not path.startswith(_SYSTEM_FOLDERS)
