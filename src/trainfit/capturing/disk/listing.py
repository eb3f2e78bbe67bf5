"""What the step sees when it looks at the disk: what would be there if it had been allowed to write."""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import os
import stat
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainfit.capturing.disk.pretended import failed, missing, path_of
from trainfit.capturing.replacing import replaced

if TYPE_CHECKING:
    from trainfit.capturing.disk.pretended import Disk, Instead

_listdir, _scandir, _lstat = os.listdir, os.scandir, os.lstat


@contextlib.contextmanager
def agreeing_globs() -> Iterator[None]:
    """Let `glob` agree as well: since Python 3.13, the classes behind it keep these functions."""
    stand_ins = {_scandir: os.scandir, _lstat: os.lstat}
    with contextlib.ExitStack() as stack:
        for owner in (one for one in vars(glob).values() if isinstance(one, type)):
            for name in ("scandir", "lstat"):
                if getattr(vars(owner).get(name), "__func__", None) in stand_ins:
                    stack.enter_context(replaced(owner, name, stand_ins.__getitem__))
        yield


def names_in(disk: Disk, folder: str, given: Any) -> list[str]:
    """Return the names that the step believes to be in a folder."""
    if folder in disk.files:
        raise failed(errno.ENOTDIR, given)
    there = [
        name
        for name in _listdir(disk.place(folder, given))
        if disk.elsewhere.real(os.path.join(folder, name), follow=False) is not None
    ]
    pretended = [os.path.basename(path) for path in disk.files if os.path.dirname(path) == folder]
    return list(dict.fromkeys([*there, *pretended, *disk.elsewhere.names_in(folder)]))


def _list(disk: Disk, original: Any, path: Any = ".") -> Any:
    folder = path_of(path) if disk.pretends else None
    if folder is None:
        return NotImplemented
    names = names_in(disk, folder, path)
    return [os.fsencode(name) for name in names] if isinstance(os.fspath(path), bytes) else names


def _scan(disk: Disk, original: Any, path: Any = ".") -> Any:
    names = _list(disk, original, path)
    if names is NotImplemented:
        return NotImplemented
    return _Entries(_Entry(name, os.path.join(os.fspath(path), name)) for name in names)


class _Entries(contextlib.AbstractContextManager["_Entries"]):
    """What `os.scandir` returns."""

    def __init__(self, entries: Iterator[_Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


class _Entry:
    """What `os.scandir` yields: asks `os.stat`, which knows what the step believes."""

    def __init__(self, name: Any, path: Any) -> None:
        self.name, self.path = name, path

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISDIR(self._mode(follow_symlinks))

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return stat.S_ISREG(self._mode(follow_symlinks))

    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self._mode(follow=False))

    def is_junction(self) -> bool:
        return False

    def _mode(self, follow: bool) -> int:
        try:
            return self.stat(follow_symlinks=follow).st_mode
        except FileNotFoundError:  # a link that leads nowhere
            return 0


def _look(disk: Disk, original: Any, path: Any, *, follow: bool = True, **kwargs: Any) -> Any:
    found = path_of(path) if disk.pretends else None
    if found is None:
        return NotImplemented
    unwritten = disk.files.get(found)
    if unwritten is not None:
        size = unwritten.snapshot.nbytes if unwritten.snapshot else 0
        return _as_of_a_file(found, size, unwritten.time_ns)
    place = disk.elsewhere.real(found, follow=follow and kwargs.get("follow_symlinks", True))
    if place is None:
        raise missing(path)
    return NotImplemented if place == found else original(place, **kwargs)


def _as_of_a_file(path: str, nbytes: int, time_ns: int) -> os.stat_result:
    seconds, mode = time_ns // 10**9, stat.S_IFREG | 0o644
    inode = zlib.crc32(path.encode())  # one per path, or `os.path.samefile` would take two for the same
    exact: dict[str, Any] = {}
    for kind in ("st_atime", "st_mtime", "st_ctime"):
        exact |= {kind: time_ns / 10**9, f"{kind}_ns": time_ns}
    numbers = (mode, inode, 0, 1, os.getuid(), os.getgid(), nbytes, seconds, seconds, seconds)
    return os.stat_result(numbers, exact)


def _ask(disk: Disk, original: Any, path: Any, mode: int, **kwargs: Any) -> Any:
    found = path_of(path) if disk.pretends else None
    if found is None:
        return NotImplemented
    if found in disk.files:
        return not mode & os.X_OK
    place = disk.elsewhere.real(found)
    return place is not None and original(place, mode, **kwargs)


INSTEAD: Instead = {
    (os, "stat"): _look,
    (os, "lstat"): functools.partial(_look, follow=False),
    (os, "access"): _ask,
    (os, "listdir"): _list,
    (os, "scandir"): _scan,
}
