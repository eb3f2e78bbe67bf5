"""What an operator's schema says about it: does it make views, mutate, draw random numbers, communicate?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

# These share memory with their input although the schema does not say so.
_UNDECLARED_VIEWS = {
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten._reshape_alias.default,
    aten.lift.default,
}
# Not part of the computation: autograd's own bookkeeping, and the profiler's ranges.
INVISIBLE = {aten.detach.default, aten.alias.default, aten._fw_primal.default, aten._version.default}
# Leave the memory as it was: the values are whatever happened to be there.
UNINITIALISED = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_permuted.default,
}
# Replace every element of their first argument, whatever it was before.
_OVERWRITES = {"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
_OVERWRITES |= {"log_normal_", "cauchy_", "geometric_"}


@dataclass(frozen=True, slots=True)
class Operator:
    """The facts about one operator overload that capture needs on every call."""

    name: str
    is_view: bool
    invisible: bool
    overwrites_first: bool
    uninitialised: bool
    random: bool
    collective: bool
    composite: bool
    runs_on_cpu: bool
    mutated: tuple[int | str, ...]
    """Positions (int) or keyword names (str) of the arguments that are written to."""
    returned: tuple[int | str | None, ...]
    """For each return: the argument it is, when it is a mutated argument; else None."""


@cache
def describe(func: OpOverload) -> Operator:
    """Return the facts about `func`, from its schema and tags."""
    schema = func._schema
    mutated: list[int | str] = []
    by_alias: dict[str, int | str] = {}
    views = func in _UNDECLARED_VIEWS
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is None:
            continue
        where: int | str = argument.name if argument.kwarg_only else position
        if alias.is_write:
            mutated.append(where)
            for name in alias.before_set:
                by_alias[name] = where
    returned: list[int | str | None] = []
    for value in schema.returns:
        alias = value.alias_info
        if alias is not None and alias.is_write:
            returned.append(next((by_alias[name] for name in alias.before_set if name in by_alias), None))
        else:
            views = views or alias is not None
            returned.append(None)
    base_name = schema.name.split("::")[-1]
    return Operator(
        name=str(func),
        # In-place views (`unsqueeze_`) change a tensor's metadata only.
        is_view=(views and not mutated) or torch.Tag.inplace_view in func.tags,
        invisible=func in INVISIBLE or func.namespace in ("profiler", "prim", "prims"),
        overwrites_first=base_name in _OVERWRITES,
        uninitialised=func in UNINITIALISED,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        collective=func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"),
        composite=_is_composite(func),
        runs_on_cpu=_has_kernel(func, "CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"),
        mutated=tuple(mutated),
        returned=tuple(returned),
    )


def _is_composite(func: OpOverload) -> bool:
    if func.namespace not in ("aten",) and not func._can_decompose():
        return False
    return _has_kernel(func, "CompositeImplicitAutograd") and not _has_kernel(func, "CPU")


def _has_kernel(func: OpOverload, *keys: str) -> bool:
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    name = func.name()
    return any(has(name, key) for key in (*keys, "CompositeExplicitAutogradNonFunctional"))


def not_an_operator(name: str) -> Operator:
    """Return the facts about an allocation that Python code makes without calling an operator."""
    nothing = dict.fromkeys(
        ("is_view", "invisible", "overwrites_first", "uninitialised", "random", "collective", "composite"),
        False,
    )
    return Operator(name=name, **nothing, runs_on_cpu=False, mutated=(), returned=(None,))
