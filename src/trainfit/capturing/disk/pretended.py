"""What would be on disk if the step had been allowed to write."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from trainfit.capturing.disk.elsewhere import Elsewhere, exists, followed, is_folder, is_in
from trainfit.capturing.disk.snapshots import Snapshot, TensorFile, restored, taken, tensors_taken
from trainfit.capturing.disk.writers import TOKEN
from trainfit.capturing.left_as_found import file_time
from trainfit.capturing.values import script_line
from trainfit.errors import CaptureError
from trainfit.traces.assumptions import Assumption

if TYPE_CHECKING:
    from trainfit.capturing.session import Session

_BEGINNING = 1 << 16
"""Bytes of a file in which its first tensor is looked for."""
_DEEPEST = 8
"""How many links to folders inside of links to folders are followed: there may be cycles."""
_listdir, _lstat, _unlink = os.listdir, os.lstat, os.unlink
Instead = dict[tuple[Any, str], Callable[..., Any]]
"""For functions, by owner and name: what `careful` calls in their place."""
_folders: dict[float, set[str]] = {}
"""Folders that a capture has made, keyed by when the capture began."""


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A file that was not written: by what, at which line, and what would be in it, if that is known."""

    writer: str
    line: str
    snapshot: Snapshot | TensorFile | None
    time_ns: int = field(default_factory=time.time_ns)


class Disk:
    """Remembers what was not written and not removed, and says so in the result."""

    def __init__(self, session: Session) -> None:
        """Begin with nothing pretended."""
        self._session = session
        self.begin = file_time()
        """What is older was there before the capture."""
        self.files: dict[str, Unwritten] = {}
        """Files that were not written, by path."""
        self.elsewhere = Elsewhere()
        self.made: list[str] = []
        """New files in their own place."""
        self.displaced: list[str] = []
        """New folders that harm nobody where they are, but that the step believes to be elsewhere."""
        self._for_real = threading.local()
        self._openings: dict[str, Assumption] = {}
        """What was noted when a file was opened, and of which line."""
        self._in_memory: list[Snapshot] = []

    @property
    def in_capture(self) -> bool:
        """Whether this thread is captured, and does not use the real disk on behalf of the capture."""
        return not getattr(self._for_real, "on", False) and any(
            mode is self._session.mode for mode in _get_current_dispatch_mode_stack()
        )

    @property
    def is_building(self) -> bool:
        """Whether the step is being built, and does not run yet."""
        return self._session.values.building

    @property
    def pretends(self) -> bool:
        """Whether anything on disk is not what the step believes."""
        return bool(self.files or self.elsewhere)

    @contextlib.contextmanager
    def for_real(self) -> Iterator[None]:
        """Let functions that know of pretended files do what they always do, in this thread."""
        before, self._for_real.on = getattr(self._for_real, "on", False), True
        try:
            yield
        finally:
            self._for_real.on = before

    @property
    def folders(self) -> set[str]:
        """Folders that this capture has made, also in an earlier attempt: they were not there before it."""
        # A folder's own time says when something in it last changed, not when it was made.
        if self.begin not in _folders:
            _folders.clear()
        return _folders.setdefault(self.begin, set())

    def skip(self, writer: str, place: Any, thing: Any = None) -> None:
        """Write nothing, say so, and remember what would be there: a snapshot is taken of it."""
        path = path_of(place)
        if path in self._openings:
            self._session.values.take_back(self._openings.pop(path))  # said better now
        self.note(f"{writer} ({self.short(path)})" if path else writer)
        if path:
            if thing is not None and not isinstance(thing, TensorFile):
                thing = taken(self._session, thing)
            self.remember(path, Unwritten(writer, script_line(), thing))

    def tensor_file(self, tensors: Any, metadata: Any) -> TensorFile:
        """Return what a file of safetensors would hold."""
        return tensors_taken(self._session, tensors, metadata)

    def restored(self, snapshot: Snapshot, map_location: Any) -> Any:
        """Return what a snapshot was taken of, over new storages."""
        return restored(self._session, snapshot, map_location)

    def remember(self, path: str, unwritten: Unwritten) -> None:
        """From now on, pretend that the file is there."""
        self.forget(path)
        self.files[path] = unwritten

    def forget(self, path: str) -> None:
        """From now on, nothing is pretended about a path or about what is in it."""
        self.elsewhere.forget(path)
        for one in [one for one in self.files if is_in(one, path)]:
            del self.files[one]

    def place(self, path: str, given: Any) -> str:
        """Return where the content of a path is on the real disk; raise if the step believes it gone."""
        place = self.elsewhere.real(path)
        if place is None:
            raise missing(given)
        return place

    def readable(self, given: Any) -> Any:
        """Return from where code that opens files without Python can read, or say why it cannot."""
        path = path_of(given) if isinstance(given, str | bytes | os.PathLike) else None
        if path is None:
            return given
        if path in self.files:
            raise self.refused(path)
        place = self.place(path, given)
        return given if place == path else place

    def is_there(self, path: str) -> bool:
        """Whether the step believes that there is something."""
        place = self.elsewhere.real(path, follow=False)
        return path in self.files or (place is not None and exists(place))

    def is_folder(self, path: str) -> bool:
        """Whether the step believes that there is a folder."""
        return path not in self.files and is_folder(self.elsewhere.real(path, follow=False) or "")

    def note(self, doing: str) -> Assumption:
        """Say in the result what was not done."""
        return self._session.values.note("skipped", doing, script_line())

    def note_opening(self, path: str) -> None:
        """Say in the result that what is written to a file will not be there."""
        self._openings[path] = self.note(f"writing to {self.short(path)}")

    def short(self, path: str) -> str:
        """Return a path as it is shown."""
        return os.path.join(*path.split(os.sep)[-2:])

    def end(self) -> None:
        """Remove what the capture has put on the disk, and files that only name tensors."""
        self.elsewhere.end()
        for path in self.made:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                if path in self.files or TOKEN in file.read(_BEGINNING):
                    _unlink(path)
        for path in self.displaced:
            if not self.is_older(path):
                shutil.rmtree(path, ignore_errors=True)

    def is_older(self, place: str) -> bool:
        """Whether a file was there before the capture, or a folder or anything in it."""
        if self.elsewhere.is_own(place):
            return False
        with contextlib.suppress(OSError), self.for_real():
            found = _lstat(place)
            if not stat.S_ISDIR(found.st_mode):
                return found.st_ctime < self.begin
            return place not in self.folders or any(
                self.is_older(os.path.join(place, name)) for name in _listdir(place)
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
            return NotImplemented if snapshot is None else self.restored(snapshot, map_location)
        saved = self.files[path].snapshot
        if not isinstance(saved, Snapshot):
            raise self.refused(path)
        return self.restored(saved, map_location)

    def _read_token(self, place: Any) -> Snapshot | None:
        if isinstance(place, str | os.PathLike):
            path = path_of(place) or ""
            if self.elsewhere.real(path) in (None, path):
                return None
            with open(place, "rb") as file:
                return self.found_in(file.read(len(TOKEN) + 20))
        if not hasattr(place, "seek"):
            return None
        start = place.tell()
        snapshot = self.found_in(place.read(len(TOKEN) + 20))
        if snapshot is None:
            place.seek(start)
        return snapshot

    def refused(self, path: str) -> CaptureError:
        """Return the error for reading a file that was not written, with the line that is running."""
        return CaptureError(self.refusal(path, script_line()))

    def refusal(self, path: str, line: str) -> str:
        """Say that a file is missing because it was not written."""
        unwritten = self.files[path]
        return (
            f"{line} reads {self.short(path)}, which {unwritten.writer} at {unwritten.line} would have "
            "written: a capture writes no tensors to disk. Leave saving and loading out of the step that is "
            "captured."
        )


def careful(disk: Disk, instead: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return what makes a function careful: in a capture, `instead(disk, original, ...)` answers for it.

    `NotImplemented` means: what always happens. That also happens to files in folders given by number.
    """

    def make(original: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            given = {name: value for name, value in kwargs.items() if not name.endswith("dir_fd")}
            by_number = any(kwargs[name] is not None for name in kwargs.keys() - given)
            if disk.in_capture and not by_number:
                answer = instead(disk, original, *args, **given)
                if answer is not NotImplemented:
                    return answer
            return original(*args, **kwargs)

        return function

    return make


def path_of(place: Any) -> str | None:
    """Return the absolute path of a file that is named or open; None for anything else."""
    if not isinstance(place, str | bytes | os.PathLike):
        place = getattr(place, "name", None)
    if not isinstance(place, str | bytes | os.PathLike):
        return None
    head, tail = os.path.split(os.path.abspath(os.fsdecode(place)))
    return os.path.join(_without_links(head), tail)


def _without_links(folder: str, depth: int = 0) -> str:
    """Return the path of a folder in which no part is a link."""
    found = os.sep
    for part in folder.split(os.sep):
        found = os.path.join(found, part)
        target = followed(found) if part else found
        if target != found and depth < _DEEPEST:
            found = _without_links(target, depth + 1)
    return found


def missing(given: Any) -> FileNotFoundError:
    """Return the error of a path that the step believes gone."""
    return failed(errno.ENOENT, given)  # type: ignore[return-value]


def failed(number: int, given: Any) -> OSError:
    """Return the error with that number, of the class that Python has for it."""
    return OSError(number, os.strerror(number), os.fspath(given))
