"""Replace an attribute for a while, and put the original back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Set `owner.name = make(original)` and put the original back at the end."""
    original = getattr(owner, name)
    replacement = _Replacement(owner, name, name in vars(owner), original, make(original))
    replacement.install()
    _installed.append(replacement)
    try:
        yield
    finally:
        _installed.remove(replacement)
        replacement.remove()


@contextlib.contextmanager
def originals() -> Iterator[None]:
    """Put all originals back for a while: what is loaded meanwhile may keep what it finds for good."""
    for replacement in reversed(_installed):
        replacement.remove()
    try:
        yield
    finally:
        for replacement in _installed:
            replacement.install()
