"""The rows of a grid as tasks: plain values, which any process understands.

A finished row is kept under a key: a hash of the task, of the versions of what computed it, and of the files
that it names. If one of these changes, the row is done again.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from trainfit import __version__
from trainfit.basics.sealed_files import canonical
from trainfit.sweeping.grid_file import Grid

ROW_SCHEMA = 1
"""Of the columns; with another one, rows of an older trainfit are done again."""
_NOT_CAPTURED = ("device", "allocator", "budget", "plan_seconds")
"""Keys that do not change what is captured, but for the kind of device."""


@dataclass(frozen=True)
class RowTask:
    """One row to be done."""

    number: int
    """Its place in the table."""
    values: dict[str, Any] = field(hash=False)
    """By key of the grid; a value of `[set]` is under `set.NAME`."""
    key: str = ""

    @property
    def capture(self) -> bytes:
        """What is the same for rows that may share a capture."""
        return canonical({name: one for name, one in self.values.items() if name not in _NOT_CAPTURED})


def tasks_of(grid: Grid) -> list[RowTask]:
    """Return all rows of a grid, in the order of the table."""
    fingerprint = cache(_fingerprint)  # a file is read once for all of its rows
    names = [*grid.axes, *(f"set.{name}" for name in grid.settings)]
    # Settings come before the device: they change the capture.
    cut = sum(name not in _NOT_CAPTURED for name in grid.axes)
    ordered = [*names[:cut], *names[len(grid.axes) :], *names[cut : len(grid.axes)]]
    axes = {**grid.axes, **{f"set.{name}": values for name, values in grid.settings.items()}}
    tasks = []
    for number, values in enumerate(itertools.product(*(axes[name] for name in ordered))):
        row = dict(zip(ordered, values))
        files = [fingerprint(one) for one in _files(row)]
        content = {"values": row, "versions": _versions(), "files": files, "schema": ROW_SCHEMA}
        tasks.append(RowTask(number, row, hashlib.sha256(canonical(content)).hexdigest()))
    return tasks


def varied(grid: Grid) -> tuple[str, ...]:
    """Return the keys that have more than one value."""
    axes = {**grid.axes, **{f"set.{name}": values for name, values in grid.settings.items()}}
    return tuple(name for name, values in axes.items() if len(values) > 1)


@cache
def _versions() -> dict[str, str]:
    found = {"trainfit": __version__}
    for name in ("torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _files(row: dict[str, Any]) -> Iterator[str]:
    """Yield what may be the path of a file that the row depends on."""
    target = str(row["target"])
    if target.startswith("hf:"):
        config = target.removeprefix("hf:")
        yield from (config, os.path.join(config, "config.json"))
    else:
        yield target.rpartition(":")[0]
    yield str(row["device"])
    yield str(row.get("allocator", ""))


def _fingerprint(path: str) -> str:
    """Return a hash of a file's content; empty if there is no such file."""
    try:
        return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()
    except (OSError, ValueError, RuntimeError):  # a name, or nothing that can be read
        return ""
