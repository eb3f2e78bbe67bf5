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

from trainfit.basics.units import format_bytes
from trainfit.errors import CaptureError

LARGEST_COPY = 1 << 30
"""The largest file, in bytes, that is copied so that the step can change the copy."""
_MOST_LINKS = 40
_SYSTEM_FOLDERS = ("/dev/", "/proc/", "/sys/")
_lstat, _stat, _mkdir, _open = os.lstat, os.stat, os.mkdir, open


class Elsewhere:
    """The files and folders whose content is elsewhere, and those that the step believes removed."""

    def __init__(self) -> None:
        """Begin with everything in its place."""
        self._places: dict[str, str | None] = {}
        """For a path: where its content is, with all that is in it; None if the step believes it removed."""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._copies = 0

    def __bool__(self) -> bool:
        """Whether anything is not in its place."""
        return bool(self._places)

    def real(self, path: str, *, follow: bool = True) -> str | None:
        """Return where the content of a path is on the real disk, if any; None if the step believes it gone.

        If a folder is elsewhere, or removed, so is all that is in it, except for paths in it with an entry of
        their own. `follow`: a link at the end of the path is followed.
        """
        if not self._places:
            return path
        for name in (path, followed(path)) if follow else (path,):
            rest = ""
            while name:
                if name in self._places:
                    place = self._places[name]
                    return None if place is None else place + rest
                name, _, last = name.rpartition(os.sep)
                rest = os.sep + last + rest
        return path

    def names_in(self, folder: str) -> list[str]:
        """Return the names in a folder whose content is elsewhere."""
        inside = (os.path.split(path) for path, place in self._places.items() if place is not None)
        return [name for head, name in inside if head == folder]

    def put(self, path: str, place: str) -> None:
        """From now on, the content of a path is in that place."""
        self._places[path] = place

    def hide(self, path: str) -> None:
        """From now on, the step believes that there is nothing."""
        self._places[path] = None

    def forget(self, path: str) -> None:
        """From now on, nothing is known about a path or about what is in it."""
        for one in [one for one in self._places if is_in(one, path)]:
            del self._places[one]

    def moved(self, source: str, target: str) -> None:
        """Move what is known about the paths in one folder to those in another one."""
        for one in [one for one in self._places if one != source and is_in(one, source)]:
            self._places[target + one[len(source) :]] = self._places.pop(one)

    def is_own(self, place: str) -> bool:
        """Whether something on the real disk is a copy that was made here."""
        return self._folder is not None and is_in(place, self._folder.name)

    def own_copy(self, path: str, *, with_content: bool) -> str:
        """Give a path a copy that may be written to, with the content that it has now or without."""
        source = self.real(path)
        if source is not None and self.is_own(source):
            return source
        copy = self._new_place(path)
        if with_content and source is not None and exists(source):
            _refuse_large(path, source)
            with _open(source, "rb") as old, _open(copy, "wb") as new:
                shutil.copyfileobj(old, new)
        self._places[followed(path) if self.real(path, follow=False) is not None else path] = copy
        return copy

    def own_folder(self, path: str) -> None:
        """Give a path an empty folder elsewhere."""
        self._places[path] = place = self._new_place(path)
        _mkdir(place)

    def _new_place(self, path: str) -> str:
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="trainfit-")
        place = os.path.join(self._folder.name, str(self._copies), os.path.basename(path))
        self._copies += 1
        _mkdir(os.path.dirname(place))
        return place

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


def is_in(path: str, folder: str) -> bool:
    """Whether a path is a folder, or is in it."""
    return path == folder or path.startswith(folder + os.sep)


def is_folder(place: str) -> bool:
    """Whether there is a folder on the real disk, and no link to one."""
    return stat.S_ISDIR(_mode(place))


def exists(path: str) -> bool:
    """Whether there is something on the real disk, if only a link that leads nowhere."""
    return _mode(path) != 0


def _mode(place: str) -> int:
    """Return what kind of thing is on the real disk; 0 for nothing."""
    try:
        return _lstat(place).st_mode
    except OSError:
        return 0


def is_ordinary(path: str) -> bool:
    """Whether a path is, or would be, an ordinary file: no device, pipe, folder or file of the system."""
    try:
        return stat.S_ISREG(_stat(path).st_mode) and not path.startswith(_SYSTEM_FOLDERS)
    except OSError:
        return not path.startswith(_SYSTEM_FOLDERS)
