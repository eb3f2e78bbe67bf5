"""The module that a target names, executed as the process that it is loaded in.

Code at the top level of a file may read RANK, ask for a GPU, or make the process group. Where a step is built
as another rank or for another kind of device than its file was executed for, or where the group that the file
made is gone, it is executed again.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch.distributed as dist


class ExecutedCode:
    """A module of the user's, as it is for the rank that this process is."""

    def __init__(self, name: str, execute: Callable[[], ModuleType], folder: str) -> None:
        """Execute it, also where it was before. What it imports from the folder belongs to it."""
        self._name, self._execute, self._folder = name, execute, os.path.join(folder, "")
        self.module = self._executed()

    def current(self) -> ModuleType:
        """Return the module, executed again if this process is another rank now, or has lost its group."""
        if _executions[self._name].is_over:
            self.module = self._executed()
        return self.module

    def _executed(self) -> ModuleType:
        last = _executions.get(self._name)
        if last is not None and last.is_over:
            for name in last.modules:
                sys.modules.pop(name, None)
        kept = last.modules if last is not None and not last.is_over else set()
        before, had_group = set(sys.modules), _has_group()
        module = self._execute()
        near = {name for name in set(sys.modules) - before if self._is_near(sys.modules[name])}
        made_group = _has_group() and not had_group
        _executions[self._name] = _Execution(os.environ.get("RANK"), _kind, made_group, near | kept)
        return module

    def _is_near(self, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None) or ""
        return file.startswith(self._folder) and f"{os.sep}site-packages{os.sep}" not in file


@dataclass(frozen=True)
class _Execution:
    rank: str | None
    kind: str
    made_group: bool
    modules: set[str]
    """It and those of its folder that it imported."""

    @property
    def is_over(self) -> bool:
        other = (os.environ.get("RANK"), _kind) != (self.rank, self.kind)
        return other or (self.made_group and not _has_group())


_kind = "cpu"
"""Of the device that files are executed for."""


@contextlib.contextmanager
def executed_for(kind: str) -> Iterator[None]:
    """Execute files for a kind of device, those again that were executed for another one."""
    global _kind
    before, _kind = _kind, kind
    try:
        yield
    finally:
        _kind = before


_executions: dict[str, _Execution] = {}
"""How each target's module was executed last: Python keeps modules for the length of the process."""


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()
