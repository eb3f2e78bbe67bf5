"""What loops do with the files that they have saved: rename, copy, link, remove and look at them.

The functions know of files that were not written. Nothing that was there before the capture is renamed,
replaced or removed; for the step it looks as if it were.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from trainfit.capturing.disk.elsewhere import exists
from trainfit.capturing.disk.pretended import path_of
from trainfit.capturing.replacing import replaced

if TYPE_CHECKING:
    from trainfit.capturing.disk.pretended import Disk

_unlink = os.unlink


@contextlib.contextmanager
def pretending(disk: Disk) -> Iterator[None]:
    """Let these functions know of files that are not where the step believes them to be."""
    with contextlib.ExitStack() as stack:
        for owner, name in ((os, "rename"), (os, "replace"), (shutil, "move")):
            stack.enter_context(replaced(owner, name, lambda o: _moves(disk, o)))
        for name in ("copyfile", "copy", "copy2"):
            stack.enter_context(replaced(shutil, name, lambda o: _copies(disk, o)))
        for name in ("copymode", "copystat"):
            stack.enter_context(replaced(shutil, name, lambda o: _marks(disk, o, 1)))
        for name in ("chmod", "utime"):
            stack.enter_context(replaced(os, name, lambda o: _marks(disk, o, 0)))
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
        if source is None or args or kwargs or not disk.in_capture:
            return original(src, dst, *args, **kwargs)
        target = _destination(source, dst)
        if source in disk.gone:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(src))
        if source in disk.files:
            disk.remember(target, disk.files.pop(source))
            _leave(disk, source)
        elif source in disk.elsewhere or disk.is_older(source) or disk.is_older(target):
            _move_content(disk, source, target)
        else:
            disk.wrote(target)
            return original(src, dst)
        return dst

    return move


def _move_content(disk: Disk, source: str, target: str) -> None:
    """Give one path the content of another, without touching what was there before."""
    place = disk.elsewhere.place(source)
    if place is None and disk.is_older(source):
        disk.note(
            f"renaming {disk.short(source)} was skipped: a capture renames nothing that was there before"
        )
        place = source
    else:
        if disk.is_older(target):
            disk.note_opening(target, older=True)
        place = place or disk.elsewhere.own_copy(source, with_content=True)
    disk.elsewhere.forget(source)
    disk.elsewhere.forget(target)
    disk.wrote(target)
    disk.elsewhere.put(target, place)
    _leave(disk, source)


def _leave(disk: Disk, path: str) -> None:
    """Let a path be empty from now on: what is really there goes, if the capture has made it."""
    if not exists(path):
        return
    if disk.is_older(path):
        disk.gone.add(path)
    else:
        _unlink(path)


def _copies(disk: Disk, original: Any) -> Any:
    def copy(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        source = path_of(src)
        if not disk.in_capture or source not in disk.files:
            return original(src, dst, *args, **kwargs)  # which opens the files, with care
        disk.remember(_destination(source, dst), disk.files[source])
        return dst

    return copy


def _marks(disk: Disk, original: Any, position: int) -> Any:
    """Leave out times and permissions of files that are not in their place, or older."""

    def mark(*args: Any, **kwargs: Any) -> None:
        path = path_of(args[position]) if len(args) > position and type(args[position]) is not int else None
        if path is None or not disk.in_capture or not _is_pretended_or_older(disk, path):
            original(*args, **kwargs)

    return mark


def _is_pretended_or_older(disk: Disk, path: str) -> bool:
    return path in disk.files or path in disk.elsewhere or disk.is_older(path)


def _links(disk: Disk, original: Any) -> Any:
    def link(src: Any, dst: Any, *args: Any, **kwargs: Any) -> Any:
        target = os.path.abspath(os.fsdecode(dst))
        source = os.path.normpath(os.path.join(os.path.dirname(target), os.fsdecode(src)))
        if disk.in_capture and source in disk.files:
            disk.remember(target, disk.files[source])
        elif disk.in_capture and target in disk.gone:
            disk.note(
                f"linking {disk.short(target)} was skipped: a capture replaces nothing that was there before"
            )
            disk.wrote(target)
            disk.elsewhere.put(target, disk.elsewhere.place(source) or source)
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
        pretended = disk.elsewhere.forget(found) is not None or bool(inside)
        if disk.is_older(found):
            disk.note(
                f"removing {disk.short(found)} was skipped: a capture removes nothing that was there before"
            )
            disk.gone.add(found)
        elif not pretended or exists(found):
            original(path, *args, **kwargs)

    return remove


def _looks(disk: Disk, original: Callable[..., os.stat_result]) -> Any:
    def look(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if type(path) is int or not disk.pretends or not disk.in_capture:
            return original(path, *args, **kwargs)
        found = path_of(path)
        if found in disk.gone:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        unwritten = disk.files.get(found or "")
        if unwritten is None:
            return original(disk.elsewhere.place(found or "") or path, *args, **kwargs)
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
