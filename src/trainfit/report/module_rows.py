"""Choose the modules worth showing: repeated layers as one line, wrappers left out, the largest kept.

What a module makes in its own `forward`, outside of its children, is a row of its own, `itself`: the loss
of a language model is often the largest of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from trainfit.module_stats import ModuleStats

_WRAPPER_SHARE = 0.95
"""A module is a mere wrapper if one child holds at least this share of what it holds."""


@dataclass
class ModuleRow:
    """Modules that play the same part, as one line: `h.0-11` stands for twelve. Bytes are their sums."""

    label: str
    """Dotted name below the root; several numbers as `0-11` or `1,4..16`."""
    members: list[ModuleStats]
    parent: ModuleRow | None = None
    children: list[ModuleRow] = field(default_factory=list)
    is_own_part: bool = False
    """Whether the row is what its parent holds without its children."""
    indent: int = 0
    """How many of the shown rows this one is inside of."""
    short_label: str = ""
    """The label without the part that the row it is inside of already says."""

    @property
    def class_name(self) -> str:
        """The class of the modules; they have the same one."""
        return self.members[0].class_name

    @property
    def held_bytes(self) -> int:
        """Parameters, buffers and what the modules made that is alive at the peak of the step."""
        return sum(m.parameter_bytes + m.buffer_bytes + m.at_peak_bytes for m in self.members)

    @property
    def parameter_bytes(self) -> int:
        """Parameters of the modules and of those below them."""
        return sum(member.parameter_bytes for member in self.members)

    @property
    def activation_bytes(self) -> int:
        """What forward leaves alive for backward."""
        return sum(member.activation_bytes for member in self.members)

    @property
    def forward_seconds(self) -> float:
        """Time of their forward; 0 where costs are not known."""
        return sum(member.forward_seconds or 0.0 for member in self.members)

    @property
    def backward_seconds(self) -> float:
        """Time of their backward, recomputation included."""
        return sum(member.backward_seconds or 0.0 for member in self.members)


def largest_rows(modules: Sequence[ModuleStats], limit: int = 10) -> list[ModuleRow]:
    """Return the `limit` largest rows as an indented tree in reading order, largest sibling first."""
    children = _children_by_name(modules)
    root = _root_row([module for module in modules if module.depth == 0], children)
    candidates = [row for row in _descendants(root) if row.held_bytes > 0 and not _says_nothing_new(row)]
    candidates.sort(key=lambda row: -row.held_bytes)
    chosen = {id(row) for row in candidates[:limit]}
    return list(_in_order(root, chosen, outer="", indent=0))


def _root_row(roots: list[ModuleStats], children: dict[str, list[ModuleStats]]) -> ModuleRow:
    """Return the row above all that can be shown: the model, or nothing in particular above several roots."""
    if len(roots) == 1 and children[roots[0].name]:
        top = ModuleRow("", roots)
        _grow(top, children)
        return top
    top = ModuleRow("", [])
    for module in roots:
        row = ModuleRow(module.name, [module], parent=top)
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


def _grow(row: ModuleRow, children: dict[str, list[ModuleStats]]) -> None:
    """Give `row` its children: those with the same name in every member, and numbered ones alike, as one."""
    by_name: dict[str, list[ModuleStats]] = {}
    for member in row.members:
        for child in children[member.name]:
            by_name.setdefault(child.name.removeprefix(member.name + "."), []).append(child)
    for names, members in _alike(by_name):
        last = _joined_label(names)
        child_row = ModuleRow(f"{row.label}.{last}" if row.label else last, members, parent=row)
        _grow(child_row, children)
        row.children.append(child_row)
    if row.children:
        row.children.append(_itself(row, children))


def _itself(row: ModuleRow, children: dict[str, list[ModuleStats]]) -> ModuleRow:
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
    return ModuleRow(f"{row.label}.itself" if row.label else "itself", own, parent=row, is_own_part=True)


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


def _descendants(row: ModuleRow) -> Iterator[ModuleRow]:
    for child in row.children:
        yield child
        yield from _descendants(child)


def _says_nothing_new(row: ModuleRow) -> bool:
    """Whether the row is a wrapper of one child, or what its parent holds almost alone."""
    if row.is_own_part:
        return row.parent is not None and row.parent.parent is not None and _nearly_all(row, row.parent)
    return any(_nearly_all(child, row) for child in row.children if not child.is_own_part)


def _nearly_all(part: ModuleRow, whole: ModuleRow) -> bool:
    return part.held_bytes >= _WRAPPER_SHARE * whole.held_bytes


def _in_order(row: ModuleRow, chosen: set[int], outer: str, indent: int) -> Iterator[ModuleRow]:
    for child in sorted(row.children, key=lambda child: -child.held_bytes):
        inner, deeper = outer, indent
        if id(child) in chosen:
            child.indent = indent
            child.short_label = child.label.removeprefix(outer + ".") if outer else child.label
            inner, deeper = child.label, indent + 1
            yield child
        yield from _in_order(child, chosen, inner, deeper)
