"""Files that are opened before tensors are saved into them: `with open(path, "wb") as f: torch.save(x, f)`.

Opening empties a file, so the old checkpoint would be gone before `torch.save` can be skipped. During a
capture a binary file is emptied only when something is really written to it, or when it is closed.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainfit.capturing.disk.pretended import Unwritten, path_of
from trainfit.capturing.disk.writers import TOKEN
from trainfit.capturing.replacing import replaced
from trainfit.capturing.values import script_line

if TYPE_CHECKING:
    from trainfit.capturing.disk.pretended import Disk


@contextlib.contextmanager
def careful_opening(disk: Disk) -> Iterator[None]:
    """Open files in this way for the length of a capture."""
    with (
        replaced(builtins, "open", lambda original: _open(disk, original)),
        replaced(io, "open", lambda original: _open(disk, original)),
    ):
        yield


def _open(disk: Disk, original: Any) -> Any:
    def careful_open(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        plain = mode in ("wb", "bw") and buffering != 0 and not any(args) and not any(kwargs.values())
        if plain and isinstance(file, str | bytes | os.PathLike) and disk.in_capture:
            return CarefulWriter(disk, file)
        return original(file, mode, buffering, *args, **kwargs)

    return careful_open


class _LateEmptied(io.FileIO):
    """A file that keeps its old content until it is written to."""

    def __init__(self, file: Any) -> None:
        self.is_new = not os.path.lexists(file)
        super().__init__(file, "wb", opener=lambda path, flags: os.open(path, flags & ~os.O_TRUNC, 0o666))
        self.is_empty = False
        self.is_kept = False

    def empty(self) -> None:
        """Do what opening usually does."""
        if not self.is_empty and not self.is_kept:
            self.is_empty = True
            os.ftruncate(super().fileno(), 0)

    def write(self, data: Any) -> int:
        self.empty()
        return super().write(data) or 0

    def close(self) -> None:
        if self.closed:
            return
        self.empty()
        super().close()
        if self.is_kept and self.is_new:
            os.unlink(self.name)


class CarefulWriter(io.BufferedWriter):
    """Writes as usual, except what stands for tensors."""

    raw: _LateEmptied

    def __init__(self, disk: Disk, file: Any) -> None:
        """Open a file for writing, and leave it as it is for now."""
        super().__init__(_LateEmptied(file))
        self._disk = disk
        disk.gone.discard(path_of(file) or "")

    def keep_old_content(self) -> None:
        """Tensors were to be written here: the file stays as it was."""
        self.raw.is_kept = True

    def fileno(self) -> int:
        """Whoever asks for the number writes behind our back."""
        self.raw.empty()
        return super().fileno()

    def write(self, data: Any) -> int:
        """Write, unless the bytes stand for tensors that were saved into memory before."""
        if TOKEN not in memoryview(data).cast("B")[: 1 << 16].tobytes() and not self.raw.is_kept:
            return super().write(data)
        snapshot = self._disk.found_in(bytes(data))
        if not self.raw.is_kept:
            self._disk.skip("writing what torch.save put into memory", self)
            path = path_of(self)
            if path is not None and snapshot is not None:
                self._disk.remember(path, Unwritten("write", script_line(), snapshot))
        return len(data)
