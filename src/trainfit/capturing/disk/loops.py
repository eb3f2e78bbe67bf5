"""What loops do with the files that they have saved: rename, copy and link them, and make folders for them.

The functions know about files that were not written. Nothing that was there before the capture is renamed or
replaced, but to the step it looks as if it were.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainfit.capturing.disk.elsewhere import exists, is_folder, is_in
from trainfit.capturing.disk.listing import names_in
from trainfit.capturing.disk.pretended import failed, missing, path_of
from trainfit.capturing.disk.removing import leave
from trainfit.capturing.replacing import replaced

if TYPE_CHECKING:
    from trainfit.capturing.disk.pretended import Disk


@contextlib.contextmanager
def pretending(disk: Disk) -> Iterator[None]:
    """Let these functions know of files that are not where the step believes them to be.

    Other functions call these: `shutil.move` renames, `shutil.copy` and `copytree` call `copyfile`.
    """
    with contextlib.ExitStack() as stack:
        for name in ("rename", "replace"):
            stack.enter_context(replaced(os, name, lambda o: _moves(disk, o)))
        stack.enter_context(replaced(shutil, "copyfile", lambda o: _copies(disk, o)))
        for name in ("copymode", "copystat"):
            stack.enter_context(replaced(shutil, name, lambda o: _marks(disk, o, 1)))
        for name in ("chmod", "utime", "chown", "lchown", "setxattr", "removexattr"):
            if hasattr(os, name):
                stack.enter_context(replaced(os, name, lambda o: _marks(disk, o, 0)))
        stack.enter_context(replaced(os, "symlink", lambda o: _links(disk, o, hard=False)))
        stack.enter_context(replaced(os, "link", lambda o: _links(disk, o, hard=True)))
        stack.enter_context(replaced(os, "mkdir", lambda o: _makes_folder(disk, o)))
        yield


def _moves(disk: Disk, original: Any) -> Any:
    def move(src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        source, target = path_of(src), path_of(dst)
        if src_dir_fd is not None or dst_dir_fd is not None or not disk.in_capture:
            original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            return
        if source is None or target is None or not disk.is_there(source):
            raise missing(src)
        _refuse_move(disk, source, target, dst)
        if source == target:
            return
        if source in disk.files:
            unwritten = disk.files.pop(source)
            leave(disk, source)
            disk.remember(target, unwritten)
        elif is_folder(disk.elsewhere.real(source, follow=False) or ""):
            _move_folder(disk, source, target)
        else:
            _move_file(disk, source, target)

    return move


def _refuse_move(disk: Disk, source: str, target: str, given: Any) -> None:
    """Raise what renaming raises where the target is in the way, or its folder is missing."""
    if not os.path.isdir(os.path.dirname(target)):
        raise missing(given)
    if not disk.is_there(target) or source == target:
        return
    moves_folder = source not in disk.files and is_folder(disk.elsewhere.real(source, follow=False) or "")
    onto_folder = target not in disk.files and is_folder(disk.elsewhere.real(target, follow=False) or "")
    if moves_folder and not onto_folder:
        raise failed(errno.ENOTDIR, given)
    if onto_folder and not moves_folder:
        raise failed(errno.EISDIR, given)
    if onto_folder and names_in(disk, target, given):
        raise failed(errno.ENOTEMPTY, given)


def _really(disk: Disk, source: str, target: str) -> bool:
    """Whether something can be renamed for real: it is in its place, and nothing older is touched."""
    real = disk.elsewhere.real
    in_place = real(source, follow=False) == source and real(target, follow=False) == target
    return in_place and not disk.is_older(source) and not (exists(target) and disk.is_older(target))


def _note_renaming(disk: Disk, path: str) -> None:
    disk.note(f"renaming {disk.short(path)}")


def _move_file(disk: Disk, source: str, target: str) -> None:
    """Give one path the content of another, without touching what was there before."""
    place = disk.elsewhere.real(source, follow=False)
    assert place is not None
    if _really(disk, source, target):
        disk.forget(target)
        with disk.for_real():
            os.replace(source, target)
        return
    if place == source and disk.is_older(source):
        _note_renaming(disk, source)
    elif exists(target) and disk.is_older(target):
        disk.note_opening(target)
    if not disk.is_older(place):
        place = disk.elsewhere.own_copy(source, with_content=True)
    leave(disk, source)
    disk.forget(target)
    disk.elsewhere.put(target, place)


def _move_folder(disk: Disk, source: str, target: str) -> None:
    """Give a folder another name, with all that is believed to be in it."""
    place = disk.elsewhere.real(source, follow=False)
    assert place is not None
    really = _really(disk, source, target)
    files = {target + one[len(source) :]: disk.files[one] for one in disk.files if is_in(one, source)}
    disk.forget(target)
    disk.elsewhere.moved(source, target)
    if really:
        with disk.for_real():
            os.rename(source, target)
        disk.folders.update([target + one[len(source) :] for one in disk.folders if is_in(one, source)])
        disk.forget(source)
    else:
        if place == source and disk.is_older(source):
            _note_renaming(disk, source)
        elif place == source:
            disk.displaced.append(place)
        disk.forget(source)
        if disk.elsewhere.real(source, follow=False) is not None and exists(source):
            disk.elsewhere.hide(source)
        disk.elsewhere.put(target, place)
    disk.files.update(files)


def _copies(disk: Disk, original: Any) -> Any:
    def copyfile(src: Any, dst: Any, **kwargs: Any) -> Any:
        source, target = path_of(src), path_of(dst)
        if not disk.in_capture or source not in disk.files or target is None:
            return original(src, dst, **kwargs)  # which opens the files, with care
        disk.remember(target, disk.files[source])
        return dst

    return copyfile


def _marks(disk: Disk, original: Any, position: int) -> Any:
    """Leave out times and permissions of files that are not in their place, or older."""

    def mark(*args: Any, **kwargs: Any) -> None:
        path = path_of(args[position]) if len(args) > position and type(args[position]) is not int else None
        if path is None or not disk.in_capture or not _is_pretended_or_older(disk, path):
            original(*args, **kwargs)

    return mark


def _is_pretended_or_older(disk: Disk, path: str) -> bool:
    return path in disk.files or disk.elsewhere.real(path) != path or disk.is_older(path)


def _links(disk: Disk, original: Any, *, hard: bool) -> Any:
    def link(src: Any, dst: Any, *args: Any, **kwargs: Any) -> None:
        target = path_of(dst)
        if target is None or not disk.in_capture or any("dir_fd" in name for name in kwargs):
            original(src, dst, *args, **kwargs)
            return
        # The source of a hard link is where it is for everyone; a symbolic link is read where it lies.
        near = os.fsdecode(src) if hard else os.path.join(os.path.dirname(target), os.fsdecode(src))
        source = path_of(near)
        assert source is not None
        if disk.is_there(target):
            raise failed(errno.EEXIST, dst)
        if source in disk.files:
            disk.remember(target, disk.files[source])
            return
        place = disk.elsewhere.real(source)
        # A hard link would give an older file a new time, and make it look new.
        if disk.elsewhere.real(target) == target and not (
            hard and (place != source or disk.is_older(source))
        ):
            original(src, dst, *args, **kwargs)
            return
        if place is None:
            raise missing(src)
        disk.note(f"linking {disk.short(target)}")
        disk.elsewhere.put(target, place)

    return link


def _makes_folder(disk: Disk, original: Any) -> Any:
    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        found = path_of(path) if dir_fd is None else None
        if found is None or not disk.in_capture:
            original(path, mode, dir_fd=dir_fd)
            return
        if disk.is_there(found):
            raise failed(errno.EEXIST, path)
        if disk.elsewhere.real(found, follow=False) == found:
            original(path, mode)
            disk.folders.add(found)
        elif os.path.isdir(os.path.dirname(found)):
            disk.elsewhere.own_folder(found)
        else:
            raise missing(path)

    return mkdir
