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

import builtins
import contextlib
import io
import os
import pickle
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from trainfit.capturing.disk.listing import agreeing
from trainfit.capturing.disk.loops import pretending
from trainfit.capturing.disk.opening import careful_opening
from trainfit.capturing.disk.removing import careful_removing
from trainfit.capturing.disk.tensor_files import MODULES, tensor_files
from trainfit.capturing.disk.writers import writers_skipped
from trainfit.capturing.replacing import replaced_by_name

if TYPE_CHECKING:
    from trainfit.capturing.session import Session

_PARTS = (writers_skipped, tensor_files, agreeing, careful_removing, pretending, careful_opening)
_MODULES = (builtins, io, os, pickle, shutil, torch, *MODULES)


@contextlib.contextmanager
def untouched(session: Session) -> Iterator[None]:
    """Keep the user's files as they are for the length of a capture."""
    disk = session.disk
    try:
        with contextlib.ExitStack() as stack:
            for part in _PARTS:
                stack.enter_context(part(disk))
            # Scripts import functions by name, and are loaded before a capture begins.
            stack.enter_context(replaced_by_name(*_MODULES))
            yield
    finally:
        disk.end()
