"""Names of modules: fully qualified, beginning with the class name of the root they belong to."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(slots=True, eq=False)
class ModuleEntry:
    """One module of the table. The reference is weak: a module that the step itself makes may be freed."""

    name: str
    class_name: str
    parent: int
    reference: weakref.ref[nn.Module]

    @property
    def module(self) -> nn.Module | None:
        """The module, or None if it is gone."""
        return self.reference()

    @property
    def own_parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters of the module itself; none if it is gone."""
        # Never `if module`: it asks for a length, which a compiled module has only if the original has.
        return () if self.module is None else tuple(self.module.parameters(recurse=False))

    @property
    def own_buffers(self) -> tuple[torch.Tensor, ...]:
        """The buffers of the module itself; none if it is gone."""
        return () if self.module is None else tuple(self.module.buffers(recurse=False))


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class; `fully_shard` gives it another one, of both."""
    kind = type(module)
    if [base.__name__ for base in kind.__bases__[:1]] == ["FSDPModule"] and len(kind.__bases__) == 2:
        kind = kind.__bases__[1]
    return kind.__name__


class ModuleTable:
    """Numbers every module; one that is called from outside the known trees becomes a root of its own."""

    def __init__(self) -> None:
        """Start without roots."""
        self.entries: list[ModuleEntry] = []
        self._roots: list[weakref.ref[nn.Module]] = []
        self._index: dict[int, int] = {}
        self._names: set[str] = set()

    @property
    def roots(self) -> list[nn.Module]:
        """The roots that still exist."""
        return [root for reference in self._roots if (root := reference()) is not None]

    def begin_with(self, model: nn.Module) -> None:
        """Name everything by its place in the model; what else is known comes after it.

        Parts of the model may have been called while it was built, before they belonged to it.
        """
        others = [root for root in self.roots if root is not model]
        self.__init__()  # type: ignore[misc]
        for root in (model, *others):
            self.index(root)

    def add_root(self, root: nn.Module) -> int:
        """Enter a module and everything below it; a shared submodule keeps its first name."""
        self._roots.append(weakref.ref(root))
        root_name = class_name(root)
        number = 2
        while root_name in self._names:
            root_name = f"{class_name(root)}#{number}"
            number += 1
        prefix_index: dict[str, int] = {}
        for path, module in root.named_modules():
            if id(module) in self._index:
                prefix_index[path] = self._index[id(module)]
                continue
            name = f"{root_name}.{path}" if path else root_name
            parent = prefix_index.get(path.rpartition(".")[0], -1) if path else -1
            self._index[id(module)] = prefix_index[path] = len(self.entries)
            self._names.add(name)
            reference = weakref.ref(module, functools.partial(self._forget, id(module)))
            self.entries.append(ModuleEntry(name, class_name(module), parent, reference))
        return self._index[id(root)]

    def _forget(self, identity: int, reference: weakref.ref[nn.Module]) -> None:
        """A module is gone, and its id may be given to another."""
        self._index.pop(identity, None)

    def find(self, module: nn.Module) -> int | None:
        """Return the number of a module, if it is known."""
        return self._index.get(id(module))

    def index(self, module: nn.Module) -> int:
        """Return the number of a module, entering it as a new root if it is not known."""
        found = self.find(module)
        return self.add_root(module) if found is None else found

    def name(self, index: int) -> str:
        """Return a module's qualified name; empty for "no module"."""
        return self.entries[index].name if index >= 0 else ""

    def owners(self) -> dict[int, int]:
        """Return, for the id of each parameter, the module that owns it (the first one, if shared)."""
        found: dict[int, int] = {}
        for number, entry in enumerate(self.entries):
            for parameter in entry.own_parameters:
                found.setdefault(id(parameter), number)
        return found
