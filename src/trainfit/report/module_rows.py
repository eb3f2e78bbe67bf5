"""Choose the modules worth showing: repeated layers as one line, wrappers left out, the largest kept.

What a module makes in its own `forward`, outside of its children, is a row of its own, `itself`: the loss
of a language model is often the largest of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainfit.memory.module_stats import ModuleStats
from trainfit.report.data import ModuleRow

_WRAPPER_SHARE = 0.95
"""A module is a mere wrapper if one child holds at least this share of what it holds."""


@dataclass
class _Node:
    """Modules that play the same part, in the tree of all rows that could be shown."""

    label: str
    """Dotted name below the root; several numbers as `0-11` or `1,4..16`."""
    members: list[ModuleStats]
    parent: _Node | None = None
    children: list[_Node] = field(default_factory=list)
    is_own_part: bool = False
    """Whether it is what its parent holds without its children."""

    @property
    def held_bytes(self) -> int:
        """Parameters, buffers and what the modules made that is alive at the peak of the step."""
        return sum(m.parameter_bytes + m.buffer_bytes + m.at_peak_bytes for m in self.members)

    def label_of(self, child: str) -> str:
        """Return the dotted name of something below."""
        return f"{self.label}.{child}" if self.label else child

    def row(self, outer: str, indent: int) -> ModuleRow:
        """Return what is shown, inside of the row that has the label `outer`."""
        return ModuleRow(
            label=self.label.removeprefix(outer + ".") if outer else self.label,
            indent=indent,
            class_name=self.members[0].class_name,  # they have the same one
            count=len(self.members),
            held_bytes=self.held_bytes,
            parameter_bytes=sum(member.parameter_bytes for member in self.members),
            whole_parameter_bytes=sum(member.whole_parameter_bytes for member in self.members),
            activation_bytes=sum(member.activation_bytes for member in self.members),
            forward_seconds=sum(member.forward_seconds or 0.0 for member in self.members),
            backward_seconds=sum(member.backward_seconds or 0.0 for member in self.members),
        )


def largest_rows(modules: Sequence[ModuleStats], limit: int = 10) -> list[ModuleRow]:
    """Return the `limit` largest rows as an indented tree in reading order, largest sibling first."""
    children = _children_by_name(modules)
    root = _root_row([module for module in modules if module.depth == 0], children)
    candidates = [row for row in _descendants(root) if row.held_bytes > 0 and not _says_nothing_new(row)]
    candidates.sort(key=lambda row: -row.held_bytes)
    chosen = {id(row) for row in candidates[:limit]}
    return list(_in_order(root, chosen, outer="", indent=0))


def _root_row(roots: list[ModuleStats], children: dict[str, list[ModuleStats]]) -> _Node:
    """Return the row above all that can be shown: the model, or nothing in particular above several roots."""
    if len(roots) == 1 and children[roots[0].name]:
        return _grown("", roots, children)
    top = _Node("", [])
    top.children = [_grown(module.name, [module], children, top) for module in roots]
    return top


def _children_by_name(modules: Sequence[ModuleStats]) -> dict[str, list[ModuleStats]]:
    """Map each module's name to the modules directly below it; the order of the tree says which those are."""
    children: dict[str, list[ModuleStats]] = {module.name: [] for module in modules}
    path: list[ModuleStats] = []
    for module in modules:
        del path[module.depth :]
        if path:
            children[path[-1].name].append(module)
        path.append(module)
    return children


def _grown(
    label: str,
    members: list[ModuleStats],
    children: dict[str, list[ModuleStats]],
    parent: _Node | None = None,
) -> _Node:
    """Return a row with its children: the same name in every member, and numbered ones alike, are one."""
    row = _Node(label, members, parent)
    by_name: dict[str, list[ModuleStats]] = {}
    for member in members:
        for child in children[member.name]:
            by_name.setdefault(child.name.removeprefix(member.name + "."), []).append(child)
    for names, alike in _alike(by_name):
        row.children.append(_grown(row.label_of(_joined_label(names)), alike, children, row))
    if row.children:
        own = [_without(member, children[member.name]) for member in members]
        row.children.append(_Node(row.label_of("itself"), own, row, is_own_part=True))
    return row


def _without(module: ModuleStats, below: list[ModuleStats]) -> ModuleStats:
    """Return what a module holds itself, without its children; rounding may leave seconds below zero."""
    own: dict[str, Any] = {}
    names = ("parameter_bytes", "whole_parameter_bytes", "buffer_bytes", "activation_bytes", "at_peak_bytes")
    for name in names:
        own[name] = getattr(module, name) - sum(getattr(child, name) for child in below)
    for name in ("forward_seconds", "backward_seconds"):
        whole, parts = getattr(module, name), sum(getattr(child, name) or 0.0 for child in below)
        own[name] = None if whole is None else max(0.0, whole - parts)
    return replace(module, **own)


def _alike(by_name: dict[str, list[ModuleStats]]) -> Iterator[tuple[list[str], list[ModuleStats]]]:
    """Join numbered siblings that are alike: of one class, with as many parameters."""
    groups: dict[object, tuple[list[str], list[ModuleStats]]] = {}
    for name, members in by_name.items():
        shape = frozenset((member.class_name, member.parameter_bytes) for member in members)
        names, joined = groups.setdefault(shape if name.isdecimal() else name, ([], []))
        names.append(name)
        joined.extend(members)
    yield from groups.values()


def _joined_label(names: list[str]) -> str:
    """Write `0-11` for numbers in sequence, else `1,4..16`."""
    if len(names) == 1:
        return names[0]
    if [int(name) for name in names] == list(range(int(names[0]), int(names[-1]) + 1)):
        return f"{names[0]}-{names[-1]}"
    return f"{names[0]},{names[1]}" if len(names) == 2 else f"{names[0]},{names[1]}..{names[-1]}"


def _descendants(row: _Node) -> Iterator[_Node]:
    for child in row.children:
        yield child
        yield from _descendants(child)


def _says_nothing_new(row: _Node) -> bool:
    """Whether the row is a wrapper of one child, or what its parent holds almost alone."""
    if row.is_own_part:
        return row.parent is not None and row.parent.parent is not None and _nearly_all(row, row.parent)
    return any(_nearly_all(child, row) for child in row.children if not child.is_own_part)


def _nearly_all(part: _Node, whole: _Node) -> bool:
    return part.held_bytes >= _WRAPPER_SHARE * whole.held_bytes


def _in_order(node: _Node, chosen: set[int], outer: str, indent: int) -> Iterator[ModuleRow]:
    for child in sorted(node.children, key=lambda child: -child.held_bytes):
        inner, deeper = outer, indent
        if id(child) in chosen:
            yield child.row(outer, indent)
            inner, deeper = child.label, indent + 1
        yield from _in_order(child, chosen, inner, deeper)
