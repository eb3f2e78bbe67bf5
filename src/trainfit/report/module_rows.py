"""Choose the modules worth showing: repeated layers as one line, wrappers left out, the largest kept.

What a module makes in its own `forward`, outside of its children, is a row of its own, `itself`: the loss
of a language model is often the largest of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

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

    def row(self, outer: str, indent: int) -> ModuleRow:
        """Return what is shown, inside of the row that has the label `outer`."""
        return ModuleRow(
            label=self.label.removeprefix(outer + ".") if outer else self.label,
            indent=indent,
            class_name=self.members[0].class_name,  # they have the same one
            count=len(self.members),
            held_bytes=self.held_bytes,
            parameter_bytes=sum(member.parameter_bytes for member in self.members),
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
        top = _Node("", roots)
        _grow(top, children)
        return top
    top = _Node("", [])
    for module in roots:
        row = _Node(module.name, [module], parent=top)
        _grow(row, children)
        top.children.append(row)
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


def _grow(row: _Node, children: dict[str, list[ModuleStats]]) -> None:
    """Give `row` its children: those with the same name in every member, and numbered ones alike, as one."""
    by_name: dict[str, list[ModuleStats]] = {}
    for member in row.members:
        for child in children[member.name]:
            by_name.setdefault(child.name.removeprefix(member.name + "."), []).append(child)
    for names, members in _alike(by_name):
        last = _joined_label(names)
        child_row = _Node(f"{row.label}.{last}" if row.label else last, members, parent=row)
        _grow(child_row, children)
        row.children.append(child_row)
    if row.children:
        row.children.append(_itself(row, children))


def _itself(row: _Node, children: dict[str, list[ModuleStats]]) -> _Node:
    """Return what the modules of `row` hold themselves, without their children."""
    own = []
    for member in row.members:
        below = children[member.name]
        own.append(
            replace(
                member,
                parameter_bytes=member.parameter_bytes - sum(child.parameter_bytes for child in below),
                buffer_bytes=member.buffer_bytes - sum(child.buffer_bytes for child in below),
                activation_bytes=member.activation_bytes - sum(child.activation_bytes for child in below),
                at_peak_bytes=member.at_peak_bytes - sum(child.at_peak_bytes for child in below),
                forward_seconds=_own(member.forward_seconds, [child.forward_seconds for child in below]),
                backward_seconds=_own(member.backward_seconds, [child.backward_seconds for child in below]),
            )
        )
    return _Node(f"{row.label}.itself" if row.label else "itself", own, parent=row, is_own_part=True)


def _own(whole: float | None, parts: list[float | None]) -> float | None:
    """Return what is left of a module's seconds without its children's; rounding may leave less than zero."""
    return None if whole is None else max(0.0, whole - sum(part or 0.0 for part in parts))


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
