"""What loops do with the files that they have saved: rename, copy and link them, and make folders for them.

The functions know about files that were not written. Nothing that was there before the capture is renamed or
replaced, but to the step it looks as if it were.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
from typing import TYPE_CHECKING, Any

from trainfit.capturing.disk.elsewhere import exists, is_in
from trainfit.capturing.disk.listing import names_in
from trainfit.capturing.disk.pretended import failed, missing, path_of
from trainfit.capturing.disk.removing import existing, leave

if TYPE_CHECKING:
    from trainfit.capturing.disk.pretended import Disk, Instead


def _move(disk: Disk, original: Any, src: Any, dst: Any) -> None:
    source, target = existing(disk, src), path_of(dst)
    if target is None:
        raise missing(dst)
    _refuse_move(disk, source, target, dst)
    if source == target:
        return
    if source in disk.files:
        unwritten = disk.files.pop(source)
        leave(disk, source)
        disk.remember(target, unwritten)
    elif disk.is_folder(source):
        _move_folder(disk, source, target)
    else:
        _move_file(disk, source, target)


def _refuse_move(disk: Disk, source: str, target: str, given: Any) -> None:
    """Raise what renaming raises where the target is in the way, or its folder is missing."""
    if not os.path.isdir(os.path.dirname(target)):
        raise missing(given)
    if not disk.is_there(target) or source == target:
        return
    moves_folder, onto_folder = disk.is_folder(source), disk.is_folder(target)
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
        disk.note(f"renaming {disk.short(source)}")
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
            disk.note(f"renaming {disk.short(source)}")
        elif place == source:
            disk.displaced.append(place)
        disk.forget(source)
        if disk.elsewhere.real(source, follow=False) is not None and exists(source):
            disk.elsewhere.hide(source)
        disk.elsewhere.put(target, place)
    disk.files.update(files)


def _copy_file(disk: Disk, original: Any, src: Any, dst: Any, **kwargs: Any) -> Any:
    source, target = path_of(src), path_of(dst)
    if source not in disk.files or target is None:
        return NotImplemented  # which opens the files, with care
    disk.remember(target, disk.files[source])
    return dst


def _mark(disk: Disk, original: Any, *args: Any, position: int = 0, **kwargs: Any) -> Any:
    """Leave out times and permissions of files that are not in their place, or older."""
    path = path_of(args[position]) if len(args) > position else None
    if path is None:
        return NotImplemented
    pretended = path in disk.files or disk.elsewhere.real(path) != path
    return None if pretended or disk.is_older(path) else NotImplemented


def _link(
    disk: Disk, original: Any, src: Any, dst: Any, *args: Any, hard: bool = False, **kwargs: Any
) -> Any:
    target = path_of(dst)
    if target is None:
        return NotImplemented
    # The source of a hard link is where it is for everyone; a symbolic link is read where it lies.
    near = os.fsdecode(src) if hard else os.path.join(os.path.dirname(target), os.fsdecode(src))
    source = path_of(near)
    assert source is not None
    if disk.is_there(target):
        raise failed(errno.EEXIST, dst)
    if source in disk.files:
        return disk.remember(target, disk.files[source])
    place = disk.elsewhere.real(source)
    # A hard link would give an older file a new time, and make it look new.
    changes = hard and (place != source or disk.is_older(source))
    if disk.elsewhere.real(target) == target and not changes:
        return NotImplemented
    if place is None:
        raise missing(src)
    disk.note(f"linking {disk.short(target)}")
    return disk.elsewhere.put(target, place)


def _make_folder(disk: Disk, original: Any, path: Any, mode: int = 0o777) -> Any:
    found = path_of(path)
    if found is None:
        return NotImplemented
    if disk.is_there(found):
        raise failed(errno.EEXIST, path)
    if disk.elsewhere.real(found, follow=False) == found:
        original(path, mode)
        return disk.folders.add(found)
    if not os.path.isdir(os.path.dirname(found)):
        raise missing(path)
    return disk.elsewhere.own_folder(found)


_mark_second = functools.partial(_mark, position=1)
INSTEAD: Instead = {
    (os, "rename"): _move,
    (os, "replace"): _move,
    (os, "symlink"): _link,
    (os, "link"): functools.partial(_link, hard=True),
    (os, "mkdir"): _make_folder,
    (shutil, "copyfile"): _copy_file,
    (shutil, "copymode"): _mark_second,
    (shutil, "copystat"): _mark_second,
    **{(os, name): _mark for name in ("chmod", "utime", "chown", "lchown", "setxattr", "removexattr")},
}
"""Other functions call these: `shutil.move` renames, `shutil.copy` and `copytree` call `copyfile`."""
