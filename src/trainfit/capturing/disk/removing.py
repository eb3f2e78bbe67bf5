"""Removing files and folders: what was there before stays, and the step believes it gone."""

from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING, Any

from trainfit.capturing.disk.elsewhere import exists, is_folder
from trainfit.capturing.disk.listing import names_in
from trainfit.capturing.disk.pretended import failed, missing, path_of

if TYPE_CHECKING:
    from trainfit.capturing.disk.pretended import Disk, Instead


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


def existing(disk: Disk, path: Any) -> str:
    """Return the path of something that the step believes to be there."""
    found = path_of(path)
    if found is None or not disk.is_there(found):
        raise missing(path)
    return found


def _remove_file(disk: Disk, original: Any, path: Any) -> None:
    found = existing(disk, path)
    if disk.is_folder(found):
        raise failed(errno.EISDIR, path)
    _remove(disk, found)


def _remove_folder(disk: Disk, original: Any, path: Any) -> None:
    found = existing(disk, path)
    if not disk.is_folder(found):
        raise failed(errno.ENOTDIR, path)
    if names_in(disk, found, path):
        raise failed(errno.ENOTEMPTY, path)
    _remove(disk, found)


def _remove_tree(
    disk: Disk, original: Any, path: Any, ignore_errors: bool = False, *args: Any, **kwargs: Any
) -> Any:
    found = path_of(path)
    if found is None:
        return NotImplemented
    if is_folder(disk.elsewhere.real(found, follow=False) or ""):
        return _remove(disk, found)
    if disk.is_there(found):
        return None if found in disk.files else NotImplemented  # which refuses files and links
    if not ignore_errors:
        raise missing(path)
    return None


INSTEAD: Instead = {
    (os, "remove"): _remove_file,
    (os, "unlink"): _remove_file,
    (os, "rmdir"): _remove_folder,
    (shutil, "rmtree"): _remove_tree,
}
