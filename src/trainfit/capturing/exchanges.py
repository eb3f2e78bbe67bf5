"""What an operator exchanges with other processes: its communication group, and how many bytes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from trainfit.operators.collectives import collective_kind
from trainfit.traces.ranks import Collective

_groups: Any = torch.distributed.distributed_c10d


@dataclass(frozen=True, slots=True)
class CommunicationGroup:
    """A communication group, in the place of torch's handle, whose address no other run has."""

    name: str
    size: int


def handle_key(handle: torch.ScriptObject) -> Hashable:
    """Return what identifies an object of torch's: the group that it is, or else only its class."""
    name = handle._type().qualified_name()
    if not name.endswith(".ProcessGroup"):
        return str(name)
    return described_group(torch.distributed.ProcessGroup.unbox(handle))


def described_group(group: Any) -> CommunicationGroup:
    """Return a group by a name that it has in every run: its dimension of a mesh, or who belongs to it."""
    label = _label(group)
    same = [other for other in _groups._world.pg_map if _label(other) == label]
    number = next((n for n, other in enumerate(same) if other.group_name == group.group_name), 0)
    return CommunicationGroup(label if number == 0 else f"{label}#{number + 1}", group.size())


def _label(group: Any) -> str:
    text: str = group.group_desc
    if text == "default_pg":
        return "world"
    if text.startswith("mesh_"):
        return text.removeprefix("mesh_")
    if text not in ("", "undefined"):
        return text
    ranks = list(_groups._world.pg_group_ranks.get(group, ()))
    if len(ranks) > 4:
        return f"{len(ranks)} ranks from {ranks[0]}"
    return f"ranks {','.join(map(str, ranks))}" if ranks else str(group.group_name)


def place_in_group(args: tuple[Any, ...]) -> int | None:
    """Return which of its group's ranks this one is, for the arguments of a collective."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and value._type().qualified_name().endswith(".ProcessGroup"):
            return int(torch.distributed.ProcessGroup.unbox(value).rank())
        if isinstance(value, torch.distributed.ProcessGroup):
            return int(value.rank())
        if isinstance(value, str) and value in _groups._world.pg_names.values():
            return int(_groups._resolve_process_group(value).rank())
    return None


def written_arguments(func: OpOverload, args: tuple[Any, ...]) -> list[Any]:
    """Return the arguments that a collective writes to; torch's schemas do not say so."""
    if collective_kind(str(func)) in ("send", "barrier"):
        return []
    names = [argument.name for argument in func._schema.arguments[: len(args)]]
    return [value for name, value in zip(names, args) if name.startswith("output") or name == "tensors"]


def outputs_of(func: OpOverload, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors that a collective writes to."""
    leaves = tree_leaves(written_arguments(func, args))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def group_of(operator_name: str, parts: tuple[Any, ...]) -> str | None:
    """Return the name of the group that a call with these arguments exchanges in, if it does."""
    found = collective_of(operator_name, parts)
    return None if found is None else found.group


def collective_of(operator_name: str, parts: tuple[Any, ...]) -> Collective | None:
    """Return what a call with these arguments exchanges, if anything; the arguments are those of its key."""
    kind = collective_kind(operator_name)
    if kind is None:
        return None
    values = [part[1] if _is_keyword(part) else part for part in parts]
    group = next((value for value in values if isinstance(value, CommunicationGroup)), None)
    exchanged = max((sum(_tensor_bytes(value)) for value in values), default=0)
    if group is None:  # functional collectives name their group, and return what they gather
        group = next(map(_named, filter(_is_text, values)), CommunicationGroup("unknown", 1))
        exchanged *= group.size if kind == "all_gather" else 1
    if kind == "all_to_all" and any(map(_is_for_one, values)):
        kind = "permute"
    return Collective(kind, group.size, group.name, exchanged, _ranks(group.name))


def _is_for_one(sizes: Any) -> bool:
    """Whether all of what is exchanged goes to one rank or comes from one: a ring is turned so."""
    return (
        isinstance(sizes, tuple)
        and len(sizes) > 1
        and all(type(size) is int for size in sizes)
        and sum(size > 0 for size in sizes) == 1
    )


def _ranks(name: str) -> tuple[tuple[int, int, int], ...]:
    """Return the ranks of a group as ranges: those of a mesh's dimension are one."""
    for group in _groups._world.pg_map:
        if described_group(group).name == name:
            return _ranges_of(_groups._world.pg_group_ranks[group])
    return ()


def _ranges_of(ranks: dict[int, int]) -> tuple[tuple[int, int, int], ...]:
    known, found = _ranges.get(id(ranks), (None, ()))
    if known is not ranks:
        if len(_ranges) >= _MOST_GROUPS:
            _ranges.clear()
        found = as_ranges(sorted(ranks))
        _ranges[id(ranks)] = ranks, found
    return found


_MOST_GROUPS = 64
_ranges: dict[int, tuple[dict[int, int] | None, tuple[tuple[int, int, int], ...]]] = {}
"""What was worked out for the groups that there are: for thousands of ranks it takes long."""


def as_ranges(numbers: list[int]) -> tuple[tuple[int, int, int], ...]:
    """Return ascending numbers as ranges (first, last, step), each as long as it can be."""
    found: list[tuple[int, int, int]] = []
    for number in numbers:
        if found:
            first, last, step = found[-1]
            if first == last or number - last == step:
                found[-1] = (first, number, number - last)
                continue
        found.append((number, number, 1))
    return tuple(found)


def _named(value: Any) -> CommunicationGroup:
    return described_group(_groups._resolve_process_group(value[1]))


def _is_keyword(part: Any) -> bool:
    return isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str)


def _is_text(value: Any) -> bool:
    """Whether a part of a key is text, and the name of a group: the reductions' names are not."""
    if not (isinstance(value, tuple) and len(value) == 2 and value[0] is str):
        return False
    return value[1] in _groups._world.pg_names.values()


def _tensor_bytes(part: Any) -> Iterator[int]:
    if not isinstance(part, tuple):
        return
    if len(part) == 3 and isinstance(part[0], torch.dtype) and isinstance(part[1], torch.Size):
        yield part[1].numel() * part[0].itemsize
    else:
        for item in part:
            yield from _tensor_bytes(item)
