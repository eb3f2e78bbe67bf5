"""A folder of files that are written together: all of them, or none."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from trainfit.basics.sealed_files import reason_of
from trainfit.errors import FileFormatError, OptionError


def check_folder(path: str, flag: str) -> None:
    """Refuse a folder that cannot be written before the work begins, not after it."""
    folder = Path(path)
    try:
        if not path or folder.is_file():
            raise OptionError(f"{flag} needs the name of a folder, got {path!r}.")
        exists = folder.is_dir()
        if not exists and not folder.parent.is_dir():
            raise OptionError(f"{flag} {path}: there is no folder {str(folder.parent)!r}.")
        os.stat(folder if exists else folder.parent)
        if not exists:
            os.lstat(folder)  # a name that no file can have, or a link that leads nowhere
            raise OptionError(f"{flag} {path}: it is not a folder.")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise OptionError(f"{flag} {path}: {reason_of(error)}.") from None
    written_to = folder if folder.is_dir() else folder.parent
    if not os.access(written_to, os.W_OK):
        raise OptionError(f"{flag} {path}: {str(written_to)!r} cannot be written to.")


def write_folder(folder: Path, files: dict[str, str]) -> None:
    """Write text files into a folder, which is made if it is not there; other files in it stay.

    They are written beside it first: if anything goes wrong until all are there, nothing has changed.
    """
    try:
        beside = Path(tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name[:40]}."))
    except (OSError, ValueError) as error:
        raise FileFormatError(f"cannot write {folder}: {reason_of(error)}.") from None
    try:
        mask = os.umask(0)  # the user's, for new files: it can only be read by setting it
        os.umask(mask)
        os.chmod(beside, 0o777 & ~mask)
        for name, text in files.items():
            (beside / name).write_bytes(text.encode())
        if folder.is_dir():
            for name in files:
                os.replace(beside / name, folder / name)
        else:
            os.rename(beside, folder)
    except OSError as error:
        raise FileFormatError(f"cannot write {folder}: {reason_of(error)}.") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
