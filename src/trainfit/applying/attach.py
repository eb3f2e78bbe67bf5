"""Puts a plan onto a model and takes it off again.

Each region's module, and the root, gets an attribute `forward` of its own, which hides that of its class. No
module is replaced or added, so names, parameters and the keys of `state_dict` stay. Copies and pickles of the
model run the plan as well.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from trainfit.applying.courses import Courses
from trainfit.applying.following import followed_inputs, followed_ops
from trainfit.applying.planned_forward import (
    PART,
    ROOT,
    STAGE,
    Calls,
    PlannedForward,
    planned_forward,
)
from trainfit.applying.planned_model import PlannedModel, Promise
from trainfit.applying.region import PlannedCall
from trainfit.applying.sharded_modules import has_distributed_weights
from trainfit.applying.way_changes import Optimizers, has_changes, make_changes, take_back
from trainfit.capturing.modules import class_name
from trainfit.errors import PlanError
from trainfit.plans.plan import Plan
from trainfit.plans.plan_origin import other_model
from trainfit.plans.ways import Way
from trainfit.traces.settings import Settings, dtype_name

_WRAPPERS = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Classes of modules around a model, and what they call it."""


def apply(model: nn.Module, plan: Plan | Way, *, optimizer: Optimizers | None = None) -> nn.Module:
    """Make `model` run a plan, or a way, that is carried out op by op, and return it.

    `trainfit.apply`, which is in `api/carry_out.py` and takes plans for torch.compile as well, says the rest.
    """
    if isinstance(plan, Way):
        return _apply_way(model, plan, optimizer)
    if optimizer is not None:
        raise PlanError("a plan says nothing about the optimizer; leave optimizer= out.")
    _refuse(model, plan)
    (root, name), another = _root(model, plan), ""
    # What a plan names may be a part of the model that was captured: then there is nothing to compare.
    if plan.settings.model_class in (_root_name(plan), class_name(root)):
        another = other_model(plan, _settings_of(root, wrapper=name.partition(".")[0] if "." in name else ""))
    # To another model it promises nothing.
    attach_plan(model, plan, promise=None if another else Promise.of(plan))
    if another:
        warnings.warn(another, stacklevel=2)
    return model


def _apply_way(model: nn.Module, way: Way, optimizer: Optimizers | None) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise PlanError(f"a way is applied to a torch.nn.Module, got {type(model).__name__}.")
    if has_changes(model) or _planned(model):
        raise PlanError("the model runs a plan or a way already: call trainfit.remove(model) first.")
    make_changes(model, way, optimizer)
    if way.plan is not None:
        try:
            apply(model, way.plan)
        except PlanError:
            take_back(model)
            raise
    return model


def _settings_of(model: nn.Module, wrapper: str = "") -> Settings:
    """Describe a model as capture does; with the class of a wrapper, as if that were around it."""
    numbers: Counter[str] = Counter()
    for parameter in model.parameters():
        numbers[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return Settings(
        dtype=dtype_name([name for name, _ in numbers.most_common()], []),
        parameters=numbers.total(),
        modules=sum(1 for _ in model.modules()) + bool(wrapper),
        model_class=wrapper or class_name(model),
    )


def attach_plan(model: nn.Module, plan: Plan, *, promise: Promise | None = None) -> nn.Module:
    """Apply a plan without comparing what it was made for: the caller has done so.

    With a `promise` there is a warning where a run shows that it is about another one.
    """
    _refuse(model, plan)
    root, root_name = _root(model, plan)
    modules = {f"{root_name}.{path}" if path else root_name: m for path, m in root.named_modules()}
    calls = _calls_of_modules(plan, modules)
    planned_model = PlannedModel(promise, root, root_name)
    # The root counts its calls, even where it is no region itself; of stages it is told when backward begins.
    stages = dict(_stages(root, root_name))
    around = {
        name: modules[name]
        for name in _around(calls, modules, root_name)
        if has_distributed_weights(modules[name])
    }
    regions = {name: modules[name] for name in calls}
    watched = _watched(plan, modules)
    beside = {name: modules[name] for name in watched}
    for name, module in {root_name: root, **stages, **around, **beside, **regions}.items():
        part = ROOT if module is root else STAGE if name in stages else PART
        own = (calls.get(name, {}), planned_model, part, watched.get(name, frozenset()))
        PlannedForward(module, name, *own).hide(module)
    return model


def _watched(plan: Plan, modules: dict[str, nn.Module]) -> dict[str, frozenset[int]]:
    """Return the calls beside which results are copied to the host, by module."""
    found: dict[str, frozenset[int]] = {}
    for call in (region.beside for region in plan.regions if region.beside is not None):
        if call.module not in modules:
            raise _other_model(f"copies to the host run beside {call.module}", modules)
        found[call.module] = found.get(call.module, frozenset()) | {call.call}
    return found


def _other_model(has: str, modules: dict[str, nn.Module]) -> PlanError:
    return PlanError(
        f"the plan belongs to another model: {has}, which this "
        f"{next(iter(modules.values())).__class__.__name__} does not have."
    )


def _can_be_called(module: nn.Module) -> bool:
    """Whether a module computes something, and is not a list of others."""
    return type(module).forward is not nn.Module.forward


def _around(regions: Iterable[str], modules: dict[str, nn.Module], root_name: str) -> Iterator[str]:
    """Yield the modules between the root and the regions that can be called."""
    for name in regions:
        name = name.rpartition(".")[0]
        while len(name) > len(root_name):
            if _can_be_called(modules[name]):
                yield name
            name = name.rpartition(".")[0]


def _stages(root: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield what is called instead of a root that only holds others: the stages of a pipeline, say."""
    if _can_be_called(root):
        return
    for path, child in root.named_children():
        if _can_be_called(child):
            yield f"{name}.{path}", child
        else:
            yield from _stages(child, f"{name}.{path}")


def _refuse(model: object, plan: object) -> None:
    """Refuse what is no plan or no model, and a model that runs a plan already."""
    if not isinstance(plan, Plan):
        raise PlanError(
            "apply takes a plan, as trainfit.plan makes it or trainfit.load_plan reads it from a file; got "
            f"{plan!r:.80}."
        )
    if not isinstance(model, nn.Module):
        raise PlanError(f"a plan is applied to a torch.nn.Module, got {type(model).__name__}.")
    if _planned(model):
        raise PlanError("the model runs a plan already: call trainfit.remove(model) before applying another.")


def remove(model: nn.Module) -> nn.Module:
    """Take the plan or the way off `model`, which is then as it was before, and return it."""
    planned = _planned(model)
    if not take_back(model) and not planned:
        raise PlanError("the model runs no plan, so there is none to remove.")
    for module, forward in planned:
        forward.restore(module)
    return model


def runs_plan(model: nn.Module) -> bool:
    """Return whether a plan is applied to `model`."""
    return bool(_planned(model))


@contextlib.contextmanager
def applied(
    model: nn.Module, plan: Plan | Way, *, optimizer: Optimizers | None = None
) -> Iterator[nn.Module]:
    """Apply a plan or a way for the length of a block."""
    apply(model, plan, optimizer=optimizer)
    try:
        yield model
    finally:
        remove(model)


def _planned(model: nn.Module) -> list[tuple[nn.Module, PlannedForward]]:
    found = [(module, planned_forward(module)) for module in model.modules()]
    return [(module, forward) for module, forward in found if forward is not None]


def _root_name(plan: Plan) -> str:
    return plan.regions[0].module.split(".")[0] if plan.regions else ""


def _root(model: nn.Module, plan: Plan) -> tuple[nn.Module, str]:
    """Return the module that the plan's names begin with, and its name there: the model, or what it wraps.

    A plan of a model in a wrapper is a plan of the model as well: it may be applied before the wrapper is
    put around it.
    """
    wanted = _root_name(plan)
    candidate: Any = model
    inside: Any = model
    while isinstance(candidate, nn.Module):
        if isinstance(candidate, nn.DataParallel) and len(candidate.device_ids) > 1:
            raise PlanError(
                "DataParallel copies the model to each device in every step, and copies cannot run a plan. "
                "Use DistributedDataParallel."
            )
        if not wanted or any(kind.__name__ == wanted for kind in type(candidate).__mro__):
            return candidate, wanted
        # What DistributedDataParallel and torch.compile call the model that they wrap.
        inside = candidate
        candidate = getattr(candidate, "module", None) or getattr(candidate, "_orig_mod", None)
    attribute = _WRAPPERS.get(wanted)
    if attribute is not None and all(r.module.split(".")[1:2] == [attribute] for r in plan.regions):
        return inside, f"{wanted}.{attribute}"
    raise PlanError(f"the plan belongs to another model: it is for a {wanted}, not a {type(model).__name__}.")


def _calls_of_modules(plan: Plan, modules: dict[str, nn.Module]) -> dict[str, Calls]:
    found: dict[str, Calls] = {}
    kinds = [(followed_ops(kind), followed_inputs(kind), Courses()) for kind in plan.kinds]
    for region, following in zip(plan.regions, (*plan.regions[1:], None)):
        if region.module not in modules:
            raise _other_model(f"it has a region {region.module}", modules)
        if not 0 <= region.kind < len(kinds):
            raise PlanError(f"the plan is broken: region {region.module} is of a kind that it does not have.")
        calls = found.setdefault(region.module, {})
        if region.call in calls:
            raise PlanError(f"the plan is broken: it has call {region.call} of {region.module} twice.")
        continued = following is not None and following.continues
        decided, inputs, courses = kinds[region.kind]
        calls[region.call] = PlannedCall(
            region.call, decided, region.continues, continued, region.whole, region.beside, inputs, courses
        )
    return found
