"""What torch's schema says about an operator, with what the registry knows by its name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from trainfit.operators.collectives import communicates
from trainfit.operators.memory_use import (
    INVISIBLE,
    INVISIBLE_NAMESPACES,
    ONLY_ALLOCATE,
    OVERWRITE_FIRST,
    UNDECLARED_VIEWS,
)
from trainfit.operators.value_use import MADE_LIKE, SIZED_BY_VALUES

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Operator:
    """The facts about one operator overload that capture needs on every call."""

    name: str
    is_view: bool
    invisible: bool
    overwrites_first: bool
    uninitialised: bool
    made_like: bool
    random: bool
    collective: bool
    composite: bool
    runs_on_cpu: bool
    mutated: tuple[int | str, ...]
    """Positions (int) or keyword names (str) of the arguments that are written to."""
    returned: tuple[int | str | None, ...]
    """For each return: the argument it is, when it is a mutated argument; else None."""

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return the tensors that a call with these arguments writes to."""
        found: list[torch.Tensor] = []
        for where in self.mutated:
            if isinstance(where, int):
                value = args[where] if where < len(args) else None
            else:
                value = kwargs.get(where)
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, list | tuple):
                found.extend(item for item in value if isinstance(item, torch.Tensor))
        return found


@cache
def describe(func: OpOverload) -> Operator:
    """Return the facts about `func`, from its schema and tags, and from the registry by its name."""
    name, schema = str(func), func._schema
    mutated: list[int | str] = []
    by_alias: dict[str, int | str] = {}
    views = name in UNDECLARED_VIEWS
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            mutated.append(argument.name if argument.kwarg_only else position)
            by_alias.update(dict.fromkeys(alias.before_set, mutated[-1]))
    returned: list[int | str | None] = []
    for value in schema.returns:
        alias = value.alias_info
        if alias is not None and alias.is_write:
            returned.append(next((by_alias[a] for a in alias.before_set if a in by_alias), None))
        else:
            views = views or alias is not None
            returned.append(None)
    return Operator(
        name=name,
        # In-place views (`unsqueeze_`) change a tensor's metadata only.
        is_view=(views and not mutated) or torch.Tag.inplace_view in func.tags,
        invisible=name in INVISIBLE or func.namespace in INVISIBLE_NAMESPACES,
        overwrites_first=name in OVERWRITE_FIRST,
        uninitialised=name in ONLY_ALLOCATE,
        made_like=name in MADE_LIKE,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        collective=communicates(name),
        composite=_is_composite(func),
        runs_on_cpu=_has_kernel(func, "CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"),
        mutated=tuple(mutated),
        returned=tuple(returned),
    )


def _is_composite(func: OpOverload) -> bool:
    can_decompose = func.namespace == "aten" or func._can_decompose()
    return can_decompose and _has_kernel(func, "CompositeImplicitAutograd") and not _has_kernel(func, "CPU")


def _has_kernel(func: OpOverload, *keys: str) -> bool:
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return any(has(name, key) for key in (*keys, "CompositeExplicitAutogradNonFunctional"))


@cache
def not_an_operator(name: str) -> Operator:
    """Return the facts about an allocation that Python code makes without calling an operator."""
    flags = dict.fromkeys((field.name for field in fields(Operator) if field.type == "bool"), False)
    return Operator(name=name, **flags, mutated=(), returned=(None,))


def overloads(name: str) -> tuple[OpOverload, ...]:
    """Return all overloads of an operator of torch's."""
    packet = getattr(aten, name)
    return tuple(getattr(packet, overload) for overload in packet.overloads())


SIZED_BY_VALUES_OVERLOADS = tuple(
    aten.repeat_interleave.Tensor if name == "repeat_interleave" else getattr(aten, name).default
    for name in SIZED_BY_VALUES
)
"""Of an operator whose result is sized by values, the overload that looks at them."""


def in_place_forms(names: str) -> dict[OpOverload, OpOverload]:
    """Return the in-place form of each operator in a text such as `mul.Tensor div.Tensor`."""
    parts = (name.split(".") for name in names.split())
    return {getattr(getattr(aten, n), o): getattr(getattr(aten, f"{n}_"), o) for n, o in parts}
