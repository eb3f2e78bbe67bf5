"""`shard`: puts a `Sharding` onto a model: FSDP2's units, which of them stay whole, what is gathered ahead.

A model that is sharded already has its units; then only what can be changed about them is set. Nothing of it
changes what is computed: parameters are gathered earlier, later or less often.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from trainfit.applying.attach import apply
from trainfit.applying.sharded_modules import is_unit
from trainfit.errors import PlanError
from trainfit.plans.sharding_choice import Sharding

_MOST_NAMED = 3


def shard(model: nn.Module, sharding: Sharding, *, mesh: Any = None, **options: Any) -> nn.Module:
    """Make `model` be sharded as `sharding` says, run its plan, and return it.

    A model without units is sharded by `fully_shard` over `mesh`, with the `options` that it takes besides
    (`mp_policy`, `offload_policy`). Tensor parallelism, if any, comes before. In a model that has units they
    must be those of the sharding; which of them stay whole after forward, and what is gathered ahead, is set.
    """
    if "reshard_after_forward" in options:
        raise PlanError("reshard_after_forward is what a sharding says for each unit; leave it out.")
    if any(is_unit(module) for module in model.modules()):
        if mesh is not None or options:
            raise PlanError(
                "the model has units of FSDP already; leave out mesh= and what else fully_shard takes, or "
                "give the model as it is before fully_shard."
            )
        _refuse_other_units(model, sharding)
    else:
        _make_units(model, sharding, {**options, **({} if mesh is None else {"mesh": mesh})})
    set_units(model, sharding.units, sharding.kept, sharding.prefetch)
    if sharding.plan is not None:
        apply(model, sharding.plan)
    return model


def set_units(model: nn.Module, units: Sequence[str], kept: Sequence[str], prefetch: int) -> None:
    """Set which units of a sharded model stay whole after forward, and how many are gathered ahead."""
    found: list[Any] = [model.get_submodule(name) for name in units]
    for name, module in zip(units, found):
        module.set_reshard_after_forward(name not in kept, recurse=False)
    if prefetch > 1:
        for number, module in enumerate(found):
            ahead = found[number + 1 : number + 1 + prefetch]
            behind = found[max(number - prefetch, 0) : number][::-1]
            if ahead:
                module.set_modules_to_forward_prefetch(ahead)
            if behind:
                module.set_modules_to_backward_prefetch(behind)


def units_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a model's units, but for the model itself."""
    return tuple(name for name, module in model.named_modules() if name and is_unit(module))


def _make_units(model: nn.Module, sharding: Sharding, options: dict[str, Any]) -> None:
    from torch.distributed.fsdp import fully_shard  # takes a second to load

    _refuse_missing(model, sharding)
    # What is inside of another unit comes first: FSDP leaves it out there.
    for name in sorted(sharding.units, key=lambda name: -name.count(".")):
        fully_shard(model.get_submodule(name), **options)
    fully_shard(model, **options)


def _refuse_missing(model: nn.Module, sharding: Sharding) -> None:
    names = {name for name, _ in model.named_modules()}
    missing = [name for name in sharding.units if name not in names]
    if missing:
        raise PlanError(
            f"the sharding is of a model with {_listed(missing)}, which this one ({type(model).__name__}) "
            "does not have; it was made for another model."
        )


def _refuse_other_units(model: nn.Module, sharding: Sharding) -> None:
    there = set(units_of(model))
    missing, more = [name for name in sharding.units if name not in there], there - set(sharding.units)
    if missing or more:
        said = f"{_listed(missing)} should be units" if missing else f"{_listed(sorted(more))} should be none"
        raise PlanError(
            f"the model is sharded into other units than this sharding has: {said}. Give the model as it is "
            "before fully_shard, with mesh=."
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    return f"{shown} and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else shown
