"""What would be on disk if the step had been allowed to write."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from trainfit.capturing.disk.elsewhere import Elsewhere
from trainfit.capturing.disk.snapshots import Snapshot, restored, taken
from trainfit.capturing.disk.writers import TOKEN
from trainfit.capturing.surroundings import file_time
from trainfit.capturing.values import script_line
from trainfit.errors import CaptureError

if TYPE_CHECKING:
    from trainfit.capturing.session import Session

_BEGINNING = 1 << 16
"""Bytes of a file in which its first tensor is looked for."""
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
        """Files that were not written, by path."""
        self.gone: set[str] = set()
        """Files and folders that were not removed, or not renamed."""
        self.elsewhere = Elsewhere()
        self.made: list[str] = []
        """New files in their own place."""
        self._openings: dict[str, tuple[str, str]] = {}
        """What was noted when a file was opened, and of which line."""
        self._in_memory: list[Snapshot] = []

    @property
    def in_capture(self) -> bool:
        """Whether the present thread is one that the capture follows."""
        return any(mode is self._session.mode for mode in _get_current_dispatch_mode_stack())

    @property
    def is_building(self) -> bool:
        """Whether the step is being built, and does not run yet."""
        return self._session.values.building

    @property
    def pretends(self) -> bool:
        """Whether anything on disk is not what the step believes."""
        return bool(self.files or self.gone or self.elsewhere)

    def skip(self, writer: str, place: Any, thing: Any = None) -> None:
        """Write nothing, say so, and remember what would be there."""
        path = path_of(place)
        if path in self._openings:
            self._session.values.take_back(*self._openings.pop(path))  # said better now
        self.note(
            f"{writer} was skipped{f' ({self.short(path)})' if path else ''}: a capture writes no tensors"
        )
        if path:
            snapshot = None if thing is None else taken(self._session, thing)
            self.remember(path, Unwritten(writer, script_line(), snapshot))

    def remember(self, path: str, unwritten: Unwritten) -> None:
        """From now on, pretend that the file is there."""
        self.wrote(path)
        self.elsewhere.forget(path)
        self.files[path] = unwritten

    def wrote(self, path: str) -> None:
        """From now on, a path has another content, wherever that is."""
        self.gone.discard(path)
        self.files.pop(path, None)

    def note(self, text: str) -> None:
        """Say in the result what was not done."""
        self._session.values.note(text, script_line())

    def note_opening(self, path: str, *, older: bool) -> None:
        """Say in the result that what is written to a file will not be there."""
        why = "changes no file that was there before" if older else "keeps no files that may hold tensors"
        text = f"writing to {self.short(path)} was skipped: a capture {why}"
        self._openings[path] = text, script_line()
        self.note(text)

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
        if isinstance(place, str | os.PathLike):
            if os.path.abspath(place) not in self.elsewhere:
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

    def refusal(self, path: str, line: str) -> str:
        """Say that a file is missing because it was not written."""
        unwritten = self.files[path]
        return (
            f"{line} reads {self.short(path)}, which {unwritten.writer} at {unwritten.line} would have "
            "written: a capture writes no tensors to disk. Leave saving and loading out of the step that is "
            "captured."
        )


def path_of(place: Any) -> str | None:
    """Return the absolute path of a file that is named or open; None for anything else."""
    if not isinstance(place, str | bytes | os.PathLike):
        place = getattr(place, "name", None)
    if not isinstance(place, str | bytes | os.PathLike):
        return None
    return os.path.abspath(os.fsdecode(place))
