"""What would be on disk if the step had been allowed to write: files that it goes on to rename or ask for."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from trainfit.capturing.disk.snapshots import Snapshot, restored, taken
from trainfit.capturing.disk.writers import TOKEN
from trainfit.capturing.replacing import replaced
from trainfit.capturing.surroundings import file_time
from trainfit.capturing.values import script_line
from trainfit.errors import CaptureError

if TYPE_CHECKING:
    from trainfit.capturing.session import Session

_lstat, _unlink = os.lstat, os.unlink


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A file that was not written: by what, at which line, and what would be in it, if that is known."""

    writer: str
    line: str
    snapshot: Snapshot | None


class Disk:
    """Remembers what was not written and not removed, and says so in the result."""

    def __init__(self, session: Session) -> None:
        """Begin with nothing pretended."""
        self._session = session
        self.begin = file_time()
        """What is older was there before the capture."""
        self.files: dict[str, Unwritten] = {}
        self.gone: set[str] = set()
        self._in_memory: list[Snapshot] = []

    @property
    def in_capture(self) -> bool:
        """Whether the present thread is one that the capture follows."""
        return any(mode is self._session.mode for mode in _get_current_dispatch_mode_stack())

    def skip(self, writer: str, place: Any, thing: Any = None) -> None:
        """Write nothing, say so, and remember what would be there."""
        path = path_of(place)
        self.note(f"{writer} was skipped{f' ({_short(path)})' if path else ''}: a capture writes no tensors")
        keep = getattr(place, "keep_old_content", None)
        if keep is not None:
            keep()
        if path:
            snapshot = None if thing is None else taken(self._session, thing)
            self.remember(path, Unwritten(writer, script_line(), snapshot))

    def remember(self, path: str, unwritten: Unwritten) -> None:
        """From now on, pretend that the file is there."""
        self.gone.discard(path)
        self.files[path] = unwritten

    def note(self, text: str) -> None:
        """Say in the result what was not done."""
        self._session.values.note(text, script_line())

    def is_older(self, path: str) -> bool:
        """Whether a file, or anything in a folder, was there before the capture."""
        with contextlib.suppress(OSError):
            found = _lstat(path)
            if not stat.S_ISDIR(found.st_mode):
                return found.st_ctime < self.begin
            return any(
                _lstat(os.path.join(folder, name)).st_ctime < self.begin
                for folder, _, names in os.walk(path)
                for name in names
            )
        return False

    # In memory ------------------------------------------------------------------------------------------

    def token_of(self, thing: Any) -> bytes:
        """Return bytes that stand for a saved object, in this capture."""
        self._in_memory.append(taken(self._session, thing))
        return TOKEN + b"%d\n" % (len(self._in_memory) - 1)

    def found_in(self, content: bytes) -> Snapshot | None:
        """Return what bytes stand for, if they do."""
        if not content.startswith(TOKEN):
            return None
        number = content[len(TOKEN) :].partition(b"\n")[0]
        return self._in_memory[int(number)] if int(number) < len(self._in_memory) else None

    def load(self, place: Any, map_location: Any) -> Any:
        """Answer `torch.load` of what this capture did not write; `NotImplemented` if it is another file."""
        path = path_of(place)
        if path is None or path not in self.files:
            snapshot = self._read_token(place)
            return NotImplemented if snapshot is None else restored(self._session, snapshot, map_location)
        unwritten = self.files[path]
        if unwritten.snapshot is None:
            raise CaptureError(self.refusal(path, script_line()))
        return restored(self._session, unwritten.snapshot, map_location)

    def _read_token(self, place: Any) -> Snapshot | None:
        if isinstance(place, str | os.PathLike) or not hasattr(place, "seek"):
            return None
        start = place.tell()
        snapshot = self.found_in(place.read(len(TOKEN) + 20))
        if snapshot is None:
            place.seek(start)
        return snapshot

    def refusal(self, path: str, line: str) -> str:
        """Say that a file is missing because it was not written."""
        unwritten = self.files[path]
        return (
            f"{line} reads {_short(path)}, which {unwritten.writer} at {unwritten.line} would have written: "
            "a capture writes no tensors to disk. Leave saving and loading out of the step that is captured."
        )


def path_of(place: Any) -> str | None:
    """Return the absolute path of a file that is named or open; None for anything else."""
    if not isinstance(place, str | bytes | os.PathLike):
        place = getattr(place, "name", None)
    if not isinstance(place, str | bytes | os.PathLike):
        return None
    return os.path.abspath(os.fsdecode(place))


def _short(path: str) -> str:
    return os.path.join(*path.split(os.sep)[-2:])


# What loops do with the files that they have saved ----------------------------------------------------------


@contextlib.contextmanager
def pretending(disk: Disk) -> Iterator[None]:
    """Let the functions that rename, copy, link, remove and look at files know of those not written."""
    with contextlib.ExitStack() as stack:
        for name in ("rename", "replace"):
            stack.enter_context(replaced(os, name, lambda o: _moves(disk, o)))
        stack.enter_context(replaced(shutil, "move", lambda o: _moves(disk, o)))
        for name in ("copyfile", "copy", "copy2"):
            stack.enter_context(replaced(shutil, name, lambda o: _copies(disk, o)))
        for name in ("symlink", "link"):
            stack.enter_context(replaced(os, name, lambda o: _links(disk, o)))
        for owner, name in ((os, "remove"), (os, "unlink"), (shutil, "rmtree")):
            stack.enter_context(replaced(owner, name, lambda o: _removes(disk, o)))
        for name in ("stat", "lstat"):
            stack.enter_context(replaced(os, name, lambda o: _looks(disk, o)))
        stack.enter_context(replaced(os, "mkdir", lambda o: _makes_folder(disk, o)))
        yield


def _destination(source: str, place: Any) -> str:
    path = os.path.abspath(os.fsdecode(place))
    return os.path.join(path, os.path.basename(source)) if os.path.isdir(path) else path


def _moves(disk: Disk, original: Any) -> Any:
    def move(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        source = path_of(src)
        if not disk.in_capture or source not in disk.files:
            return original(src, dst, *args, **kwargs)
        if _exists(source) and not disk.is_older(source):
            _unlink(source)  # an empty temporary file that was to be filled
        disk.remember(_destination(source, dst), disk.files.pop(source))
        return dst

    return move


def _copies(disk: Disk, original: Any) -> Any:
    def copy(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        source = path_of(src)
        if not disk.in_capture or source not in disk.files:
            return original(src, dst, *args, **kwargs)
        disk.remember(_destination(source, dst), disk.files[source])
        return dst

    return copy


def _links(disk: Disk, original: Any) -> Any:
    def link(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        target = os.path.abspath(os.fsdecode(dst))
        source = os.path.normpath(os.path.join(os.path.dirname(target), os.fsdecode(src)))
        if disk.in_capture and source in disk.files:
            disk.remember(target, disk.files[source])
        elif disk.in_capture and target in disk.gone:
            disk.note(
                f"linking {_short(target)} was skipped: a capture replaces nothing that was there before"
            )
            disk.gone.discard(target)
        else:
            original(src, dst, *args, **kwargs)

    return link


def _removes(disk: Disk, original: Any) -> Any:
    def remove(path: Any, *args: Any, **kwargs: Any) -> None:
        found = path_of(path) if not kwargs.get("dir_fd") else None
        if not disk.in_capture or found is None:
            original(path, *args, **kwargs)
            return
        if found in disk.gone:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        inside = [one for one in disk.files if one == found or one.startswith(found + os.sep)]
        for one in inside:
            del disk.files[one]
        if disk.is_older(found):
            disk.note(
                f"removing {_short(found)} was skipped: a capture removes nothing that was there before"
            )
            disk.gone.add(found)
        elif not inside or _exists(found):
            original(path, *args, **kwargs)

    return remove


def _exists(path: str) -> bool:
    try:
        _lstat(path)
    except OSError:
        return False
    return True


def _looks(disk: Disk, original: Callable[..., os.stat_result]) -> Any:
    def look(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if type(path) is int or not (disk.files or disk.gone) or not disk.in_capture:
            return original(path, *args, **kwargs)
        found = path_of(path)
        if found in disk.gone:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        unwritten = disk.files.get(found or "")
        if unwritten is None:
            return original(path, *args, **kwargs)
        size = unwritten.snapshot.nbytes if unwritten.snapshot else 0
        now = int(time.time())
        return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, os.getuid(), os.getgid(), size, now, now, now))

    return look


def _makes_folder(disk: Disk, original: Any) -> Any:
    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        found = path_of(path)
        if found in disk.gone and disk.in_capture:
            disk.gone.discard(found)
        else:
            original(path, *args, **kwargs)

    return mkdir
