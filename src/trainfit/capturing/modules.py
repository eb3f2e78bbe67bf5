"""Names of modules: fully qualified, beginning with the class name of the root they belong to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(slots=True, eq=False)
class ModuleEntry:
    """One module of the table. `module` keeps the object alive, so that its id stays its own."""

    name: str
    class_name: str
    parent: int
    module: nn.Module


class ModuleTable:
    """Numbers every module; one that is called from outside the known trees becomes a root of its own."""

    def __init__(self) -> None:
        """Start without roots."""
        self.entries: list[ModuleEntry] = []
        self.roots: list[nn.Module] = []
        self._index: dict[int, int] = {}
        self._names: set[str] = set()

    def add_root(self, root: nn.Module) -> int:
        """Enter a module and everything below it; a shared submodule keeps its first name."""
        self.roots.append(root)
        root_name = type(root).__name__
        number = 2
        while root_name in self._names:
            root_name = f"{type(root).__name__}#{number}"
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
            self.entries.append(ModuleEntry(name, type(module).__name__, parent, module))
        return self._index[id(root)]

    def index(self, module: nn.Module) -> int:
        """Return the number of a module, entering it as a new root if it is not known."""
        found = self._index.get(id(module))
        return self.add_root(module) if found is None else found

    def name(self, index: int) -> str:
        """Return a module's qualified name; empty for "no module"."""
        return self.entries[index].name if index >= 0 else ""
