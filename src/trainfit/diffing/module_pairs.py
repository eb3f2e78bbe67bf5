"""Which module of one result is which of the other.

Roots are the same whatever they are called, if there is one on each side. Below, modules with the same name
in the same parent are the same. Of those that are left in a parent, two that are built alike (classes and
parameters of everything inside) are the same under another name. The rest was added or removed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from trainfit.diffing.result_reading import ReadModule


@dataclass
class TreeModule:
    """A module with those directly inside."""

    module: ReadModule
    inside: list[TreeModule] = field(default_factory=list)

    def name_in(self, parent: TreeModule) -> str:
        """Return the name that it has in its parent."""
        return self.module.name.removeprefix(parent.module.name + ".")

    @property
    def build(self) -> tuple[object, ...]:
        """How it is built: the same for modules that differ in nothing but their names."""
        module = self.module
        return (module.class_name, module.parameter_bytes, *(child.build for child in self.inside))


@dataclass(frozen=True)
class ModulePair:
    """A module on both sides; None where it is not."""

    old: ReadModule | None
    new: ReadModule | None
    renamed: bool = False
    """Whether it, or a module around it, has another name."""


def module_pairs(old: Sequence[ReadModule], new: Sequence[ReadModule]) -> list[ModulePair]:
    """Pair the modules of two trees, which are given in order."""
    roots, new_roots = _trees(old), _trees(new)
    if len(roots) == len(new_roots) == 1:
        renamed = roots[0].module.name != new_roots[0].module.name
        return list(_pairs(roots[0], new_roots[0], renamed))
    return list(_pairs_inside(roots, new_roots, None, None, False))


def _trees(modules: Sequence[ReadModule]) -> list[TreeModule]:
    roots: list[TreeModule] = []
    path: list[TreeModule] = []
    for module in modules:
        tree = TreeModule(module)
        del path[module.depth :]
        (path[-1].inside if path else roots).append(tree)
        path.append(tree)
    return roots


def _pairs(old: TreeModule, new: TreeModule, renamed: bool) -> Iterator[ModulePair]:
    yield ModulePair(old.module, new.module, renamed)
    yield from _pairs_inside(old.inside, new.inside, old, new, renamed)


def _pairs_inside(
    old: Sequence[TreeModule],
    new: Sequence[TreeModule],
    old_parent: TreeModule | None,
    new_parent: TreeModule | None,
    renamed: bool,
) -> Iterator[ModulePair]:
    by_name = {_name(tree, new_parent): tree for tree in new}
    left: list[TreeModule] = []
    for tree in old:
        same = by_name.pop(_name(tree, old_parent), None)
        if same is None:
            left.append(tree)
        else:
            yield from _pairs(tree, same, renamed)
    alike: defaultdict[tuple[object, ...], list[TreeModule]] = defaultdict(list)
    for tree in by_name.values():
        alike[tree.build].append(tree)
    for tree in left:
        if alike[tree.build]:
            yield from _pairs(tree, alike[tree.build].pop(0), True)
        else:
            yield from (ModulePair(module, None) for module in _everything(tree))
    for trees in alike.values():
        for tree in trees:
            yield from (ModulePair(None, module) for module in _everything(tree))


def _name(tree: TreeModule, parent: TreeModule | None) -> str:
    return tree.module.name if parent is None else tree.name_in(parent)


def _everything(tree: TreeModule) -> Iterator[ReadModule]:
    yield tree.module
    for child in tree.inside:
        yield from _everything(child)
