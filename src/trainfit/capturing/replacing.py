"""Replace an attribute for a while, and put the original back."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True, eq=False)
class _Replacement:
    owner: Any
    name: str
    own: bool
    """Whether the owner itself had the attribute, or a class it inherits from."""
    original: Any
    stand_in: Any

    def install(self) -> None:
        setattr(self.owner, self.name, self.stand_in)

    def remove(self) -> None:
        if self.own:
            setattr(self.owner, self.name, self.original)
        else:
            delattr(self.owner, self.name)


_installed: list[_Replacement] = []


@contextlib.contextmanager
def replaced(
    owner: Any, name: str, make: Callable[[Any], Any], *, may_be_missing: bool = False
) -> Iterator[None]:
    """Set `owner.name = make(original)` and put the original back at the end."""
    original = getattr(owner, name, None) if may_be_missing else getattr(owner, name)
    stored = vars(owner).get(name)
    stand_in = make(original)
    if isinstance(stored, staticmethod):
        original, stand_in = stored, staticmethod(stand_in)
    replacement = _Replacement(owner, name, name in vars(owner), original, stand_in)
    replacement.install()
    _installed.append(replacement)
    try:
        yield
    finally:
        _installed.remove(replacement)
        replacement.remove()


@contextlib.contextmanager
def originals() -> Iterator[None]:
    """Put all originals back for a while: a module that is loaded meanwhile may keep what it finds."""
    for replacement in reversed(_installed):
        replacement.remove()
    try:
        yield
    finally:
        for replacement in _installed:
            replacement.install()


@contextlib.contextmanager
def while_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute another value for a while; `originals` does not concern it."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


# By name --------------------------------------------------------------------------------------------------

_OWNERS = {"posix", "_io", "_pickle", "_frozen_importlib_external"}
"""Modules that define functions of `os`, `io` and `pickle`: Python's import system looks them up there."""
_LIBRARIES = tuple({sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "purelib", "platlib")})
_without: dict[str, tuple[int, int]] = {}
"""Modules of libraries that had none of the names when last searched: their dict, and its length then."""
_wanted: set[int] = set()
"""Ids of all functions that were ever looked for."""


@contextlib.contextmanager
def replaced_by_name(*owners: ModuleType) -> Iterator[None]:
    """Replace what was replaced in these modules also where others imported it: `from os import remove`.

    Names of modules only: a function kept in a default argument or in a closure stays the original. What a
    module imports meanwhile is put back with the rest.
    """
    found = [one for one in _installed if any(one.owner is owner for owner in owners)]
    stand_ins = {id(one.original): one.stand_in for one in found}
    if not _wanted.issuperset(stand_ins):
        _without.clear()
        _wanted.update(stand_ins)
    bound = _rebind(stand_ins)
    try:
        yield
    finally:
        _rebind({id(one.stand_in): one.original for one in found})
        for names, name, original, stand_in in bound:  # modules may have left `sys.modules`
            if names.get(name) is stand_in:
                names[name] = original


def _rebind(others: Mapping[int, Any]) -> list[tuple[dict[str, Any], str, Any, Any]]:
    """Bind each name of a loaded module whose value has one of these ids to the other value."""
    changed = []
    # A module that has a stand-in now has the original later.
    all_ids = _wanted.union(others, (id(one.stand_in) for one in _installed))
    for module_name, module in list(sys.modules.items()):
        has_to_keep_originals = module_name in _OWNERS or module_name.startswith("trainfit.")
        if has_to_keep_originals or not isinstance(module, ModuleType):
            continue
        names = object.__getattribute__(module, "__dict__")  # a lazy module would load itself
        # Thousands of modules: what libraries import they import once, when they are loaded.
        state = id(names), len(names)
        if _without.get(module_name) == state:
            continue
        if all_ids.isdisjoint(map(id, names.values())):
            if str(names.get("__file__")).startswith(_LIBRARIES):
                _without[module_name] = state
            continue
        for name, value in list(names.items()):
            if id(value) in others:
                names[name] = others[id(value)]
                changed.append((names, name, value, names[name]))
    return changed
