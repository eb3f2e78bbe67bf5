"""A capture writes no tensors to disk, and removes nothing that was there before it.

What a step saves while it is captured is made of tensors without memory, or of values that a few steps have
made: neither may overwrite a checkpoint. `writers.py` has the table of the functions that write
tensors; they are skipped, with a note that names the line. `opening.py` handles files that the step opens
itself: what it writes to them goes to copies (`elsewhere.py`). `pretended.py` knows what would now be on
disk; `listing.py` shows that to the step, `removing.py` removes from that only, and `loops.py` lets a loop go
on as usual (rename its temporary file, link to the latest). `snapshots.py` gives back to `torch.load` what
was "saved", and `tensor_files.py` to safetensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from trainfit.capturing.disk import listing, loops, opening, removing, tensor_files, writers
from trainfit.capturing.disk.pretended import careful
from trainfit.capturing.replacing import replaced, replaced_by_name

if TYPE_CHECKING:
    from trainfit.capturing.session import Session

_INSTEAD = {
    (owner, name): instead
    for part in (writers, tensor_files, listing, removing, loops, opening)
    for (owner, name), instead in part.INSTEAD.items()
    if hasattr(owner, name)
}


@contextlib.contextmanager
def untouched(session: Session) -> Iterator[None]:
    """Keep the user's files as they are for the length of a capture."""
    disk = session.disk
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(writers.writers_skipped(disk))
            for (owner, name), instead in _INSTEAD.items():
                stack.enter_context(replaced(owner, name, careful(disk, instead)))
            stack.enter_context(listing.agreeing_globs())
            stack.enter_context(opening.careful_databases(disk))
            # Scripts import functions by name, and are loaded before a capture begins.
            modules = {owner for owner, _ in _INSTEAD if isinstance(owner, ModuleType)}
            stack.enter_context(replaced_by_name(*modules))
            yield
    finally:
        disk.end()
