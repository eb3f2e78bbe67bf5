"""The changes between two readings, as what a reader sees of them."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trainfit.basics.visible_text import shortened
from trainfit.diffing.module_pairs import ModulePair, module_pairs
from trainfit.diffing.result_reading import NamedReading, ReadModule, ResultReading
from trainfit.report.diff_data import (
    Change,
    DiffSide,
    ModuleChange,
    OperatorChange,
    OtherValue,
    RegionChange,
    State,
)

_FIGURES = (
    *("peak_bytes", "persistent_bytes", "allocated_peak_bytes", "reserved_peak_bytes"),
    *("smallest_memory_bytes", "budget_bytes"),
    *("step_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds", "recompute_seconds"),
    *("communication_seconds", "flops", "ops"),
)
_OF_THE_MODEL = ("parameters", "trainable_parameters", "modules")
"""Settings that say what the model is, not what was asked for."""
_INSIDE_SHARE = 0.95
"""A module's change is explained by one inside of it that has at least this share of it."""
_ROUNDING = 1e-9
_LONGEST_NAME = 80
_FEW = 3
"""So many of several modules that are alike are named one by one."""


def side_of(side: NamedReading) -> DiffSide:
    """Return what is said about one side."""
    found, peak = side.reading, side.reading.peak
    where = f"{peak.op} in {shortened(peak.module, _LONGEST_NAME)}, {peak.phase}" if peak.op else ""
    return DiffSide(side.name, found.target, found.device, found.torch, found.ops, where)


def other_values(old: NamedReading, new: NamedReading) -> tuple[OtherValue, ...]:
    """Return what the two were asked for differently: the device, the cluster, the settings of the step."""
    both = [_asked(side) for side in (old, new)]
    names = dict.fromkeys(name for side in both for name in side)
    return tuple(
        OtherValue(name, both[0].get(name, "-"), both[1].get(name, "-"))
        for name in names
        if both[0].get(name) != both[1].get(name)
    )


def _asked(side: NamedReading) -> dict[str, str]:
    found = side.reading
    values: dict[str, Any] = {
        "target": found.target,
        "device": found.device,
        "torch": found.torch,
        "world size": found.world_size,
        "rank": found.rank,
        "mesh": ",".join(f"{name}={size}" for name, size in found.mesh.items()),
        "budget": found.budget_bytes,
    }
    for name, value in side.settings.items():
        if name in _OF_THE_MODEL:
            continue
        inner = value if isinstance(value, dict) else {name: value}
        values |= {str(key): one for key, one in inner.items()}
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in values.items()
        if value is not None and value != ""
    }


def figures(old: ResultReading, new: ResultReading) -> tuple[Change, ...]:
    """Return every figure that both sides have."""
    pairs = [(name, getattr(old, name), getattr(new, name)) for name in _FIGURES]
    return tuple(change(name, one, two) for name, one, two in pairs if one is not None and two is not None)


def change(name: str, old: float, new: float) -> Change:
    """Return a figure on both sides."""
    grown = minus(new, old)
    return Change(name, old, new, grown, grown / old if old else None)


def categories(old: ResultReading, new: ResultReading) -> tuple[Change, ...]:
    """Return the categories whose bytes at the peak are not the same."""
    names = dict.fromkeys([*old.by_category, *new.by_category])
    found = [change(name, old.by_category.get(name, 0), new.by_category.get(name, 0)) for name in names]
    return tuple(sorted((one for one in found if one.change), key=lambda one: -abs(one.change or 0)))


def operators(old: ResultReading, new: ResultReading) -> tuple[OperatorChange, ...]:
    """Return the operators that are called more or less often, or take another time."""
    before, after = ({one.name: one for one in side.operators} for side in (old, new))
    timed = all(one.seconds is not None for one in (*old.operators, *new.operators))
    found = []
    for name in dict.fromkeys([*before, *after]):
        first, second = before.get(name), after.get(name)
        calls = [one.calls if one else 0 for one in (first, second)]
        slow, slower = ((one.seconds if one else 0.0) if timed else None for one in (first, second))
        grown = _grown(slower, slow)
        if calls[0] != calls[1] or grown:
            found.append(OperatorChange(name, calls[0], calls[1], slow, slower, grown))
    return tuple(
        sorted(found, key=lambda one: (-abs(one.change_seconds or 0.0), -abs(one.new_calls - one.old_calls)))
    )


def regions(old: ResultReading, new: ResultReading) -> tuple[RegionChange, ...]:
    """Return the modules whose regions are not the same in two plans."""
    names = dict.fromkeys(pattern_of(one.module) for one in (*old.regions, *new.regions))
    found = []
    for name in names:
        sides = [[one for one in side.regions if pattern_of(one.module) == name] for side in (old, new)]
        counts = [len(side) for side in sides]
        kept = [sum(one.kept_bytes for one in side) for side in sides]
        seconds = [sum(one.recompute_seconds for one in side) for side in sides]
        if counts[0] != counts[1] or kept[0] != kept[1] or minus(seconds[1], seconds[0]):
            found.append(RegionChange(name, *counts, *kept, *seconds))
    return tuple(sorted(found, key=lambda one: -abs(one.new_kept_bytes - one.old_kept_bytes)))


def pattern_of(name: str) -> str:
    """Return a module's name with `*` for numbers: those of layers that are alike."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def modules(old: ResultReading, new: ResultReading) -> tuple[ModuleChange, ...]:
    """Return the modules that are not the same, those that grew or shrank the most first."""
    groups: defaultdict[str, list[ModulePair]] = defaultdict(list)
    for pair in module_pairs(old.modules, new.modules):
        groups[pattern_of(_shown(pair).name)].append(pair)
    found: list[ModuleChange] = []
    for name, members in groups.items():
        different = [pair for pair in members if _differs(pair)]
        both = [pair for pair in different if pair.old and pair.new]
        if different and len(different) == len(both) <= _FEW and len(both) < len(members):
            found += [_module_change(_shown(pair).name, [pair]) for pair in both]
        elif different:
            found.append(_module_change(name, members))
    ordered = sorted(found, key=_size_of_change, reverse=True)
    return tuple(_with_inside(one, ordered) for one in ordered)


def _shown(pair: ModulePair) -> ReadModule:
    module = pair.new or pair.old
    assert module is not None
    return module


def _differs(pair: ModulePair) -> bool:
    if pair.old is None or pair.new is None or _renamed_itself(pair):
        return True
    slower = _grown(_seconds(pair.new), _seconds(pair.old))
    return bool(slower) or any(figure(pair.old) != figure(pair.new) for figure in _BYTES)


def _renamed_itself(pair: ModulePair) -> bool:
    """Whether a module has another name in its parent; what is inside follows from that."""
    if not pair.renamed or pair.old is None or pair.new is None:
        return False
    return pair.old.name.rpartition(".")[2] != pair.new.name.rpartition(".")[2]


def _held(module: ReadModule) -> int:
    return module.parameter_bytes + module.buffer_bytes + module.at_peak_bytes


def _seconds(module: ReadModule) -> float | None:
    both = (module.forward_seconds, module.backward_seconds)
    return None if None in both else sum(one for one in both if one is not None)


_BYTES: tuple[Callable[[ReadModule], int], ...] = (
    _held,
    lambda module: module.parameter_bytes,
    lambda module: module.activation_bytes,
)


def _module_change(name: str, pairs: Sequence[ModulePair]) -> ModuleChange:
    old = [pair.old for pair in pairs if pair.old is not None]
    new = [pair.new for pair in pairs if pair.new is not None]
    held, parameters, activations = ([sum(map(one, side)) for side in (old, new)] for one in _BYTES)
    timed = [_total(map(_seconds, side)) for side in (old, new)]
    renamed = [pair for pair in pairs if pair.renamed and pair.old]
    state: State = "changed"
    if not old or not new:
        state = "added" if new else "removed"
    elif renamed:
        state = "renamed"
    was = renamed[0].old.name if renamed and renamed[0].old else ""
    return ModuleChange(
        module=name,
        was=pattern_of(was) if "*" in name else was,
        state=state,
        class_name=_shown(pairs[0]).class_name,
        old_count=len(old),
        new_count=len(new),
        old_held_bytes=held[0],
        new_held_bytes=held[1],
        held_change_bytes=held[1] - held[0],
        parameter_change_bytes=parameters[1] - parameters[0],
        activation_change_bytes=activations[1] - activations[0],
        old_seconds=timed[0],
        new_seconds=timed[1],
        change_seconds=_grown(timed[1], timed[0]),
        explained_inside=False,
    )


def _total(seconds: Iterable[float | None]) -> float | None:
    found = list(seconds)
    return None if None in found else sum((one for one in found if one is not None), 0.0)


def minus(new: float, old: float) -> float:
    """Return by how much a figure grew: 0 if not by more than seconds are rounded when they are summed up."""
    exact = isinstance(new, int) and isinstance(old, int)
    return 0.0 if not exact and math.isclose(new, old, rel_tol=_ROUNDING) else new - old


def _grown(new: float | None, old: float | None) -> float | None:
    return None if new is None or old is None else minus(new, old)


def _size_of_change(one: ModuleChange) -> tuple[float, ...]:
    return (
        max(abs(one.held_change_bytes), abs(one.activation_change_bytes)),
        abs(one.change_seconds or 0.0),
        # Of two that say the same, the outer one is first.
        -one.module.count("."),
    )


def _with_inside(one: ModuleChange, others: Sequence[ModuleChange]) -> ModuleChange:
    """Say whether a change is nearly all that of one module inside."""
    inside = [other for other in others if other.module.startswith(f"{one.module}.")]
    explained = one.state == "changed" and any(
        abs(other.held_change_bytes) >= _INSIDE_SHARE * abs(one.held_change_bytes)
        and abs(other.activation_change_bytes) >= _INSIDE_SHARE * abs(one.activation_change_bytes)
        and abs(other.change_seconds or 0.0) >= _INSIDE_SHARE * abs(one.change_seconds or 0.0)
        for other in inside
    )
    # What is inside of something new or gone, or follows from another name, need not be said again.
    outer = any(
        one.module.startswith(f"{other.module}.") and other.state == one.state != "changed"
        for other in others
    )
    return ModuleChange(**{**vars(one), "explained_inside": explained or outer})
