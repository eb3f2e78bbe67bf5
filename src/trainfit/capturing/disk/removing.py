"""Removing files and folders: what was there before stays, and the step believes it gone."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainfit.capturing.disk.elsewhere import exists, is_folder
from trainfit.capturing.disk.listing import names_in
from trainfit.capturing.disk.pretended import failed, missing, path_of
from trainfit.capturing.replacing import replaced

if TYPE_CHECKING:
    from trainfit.capturing.disk.pretended import Disk


@contextlib.contextmanager
def careful_removing(disk: Disk) -> Iterator[None]:
    """Remove only what the capture has made."""
    with contextlib.ExitStack() as stack:
        for name in ("remove", "unlink"):
            stack.enter_context(replaced(os, name, lambda o: _removes_file(disk, o)))
        stack.enter_context(replaced(os, "rmdir", lambda o: _removes_folder(disk, o)))
        stack.enter_context(replaced(shutil, "rmtree", lambda o: _removes_tree(disk, o)))
        yield


def leave(disk: Disk, path: str) -> None:
    """Let a path be empty from now on: what is really there is removed, if the capture has made it."""
    disk.forget(path)
    place = disk.elsewhere.real(path, follow=False)
    if place is None or not exists(place):
        return
    if disk.is_older(place):
        disk.elsewhere.hide(path)
        return
    with disk.for_real():
        if is_folder(place):
            shutil.rmtree(place)
        else:
            os.unlink(place)


def _remove(disk: Disk, path: str) -> None:
    place = disk.elsewhere.real(path, follow=False)
    if place is not None and disk.is_older(place):
        disk.note(f"removing {disk.short(path)}")
    leave(disk, path)


def _removes_file(disk: Disk, original: Any) -> Any:
    def remove(path: Any, *, dir_fd: int | None = None) -> None:
        found = path_of(path) if dir_fd is None else None
        if found is None or not disk.in_capture:
            original(path, dir_fd=dir_fd)
            return
        if not disk.is_there(found):
            raise missing(path)
        if found not in disk.files and is_folder(disk.elsewhere.real(found, follow=False) or ""):
            raise failed(errno.EISDIR, path)
        _remove(disk, found)

    return remove


def _removes_folder(disk: Disk, original: Any) -> Any:
    def rmdir(path: Any, *, dir_fd: int | None = None) -> None:
        found = path_of(path) if dir_fd is None else None
        if found is None or not disk.in_capture:
            original(path, dir_fd=dir_fd)
            return
        if not disk.is_there(found):
            raise missing(path)
        if found in disk.files or not is_folder(disk.elsewhere.real(found, follow=False) or ""):
            raise failed(errno.ENOTDIR, path)
        if names_in(disk, found, path):
            raise failed(errno.ENOTEMPTY, path)
        _remove(disk, found)

    return rmdir


def _removes_tree(disk: Disk, original: Any) -> Any:
    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        found = path_of(path) if kwargs.get("dir_fd") is None else None
        if found is None or not disk.in_capture:
            original(path, *args, **kwargs)
        elif is_folder(disk.elsewhere.real(found, follow=False) or ""):
            _remove(disk, found)
        elif not disk.is_there(found) and not (args[0] if args else kwargs.get("ignore_errors")):
            raise missing(path)
        elif disk.is_there(found) and found not in disk.files:
            original(path, *args, **kwargs)  # which refuses files and links

    return rmtree
