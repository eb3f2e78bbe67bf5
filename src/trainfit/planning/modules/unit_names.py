"""Modules by name: which may be AC units, and which are FSDP units."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from trainfit.errors import OptionError
from trainfit.traces.trace import Trace


def allowed_modules(trace: Trace, ac_units: Sequence[str] | None, fsdp_units: Sequence[str]) -> set[int]:
    """Return the modules that may be AC units; refuse names that cannot be meant."""
    parents = {module.parent for module in trace.modules}
    above = {
        outer
        for name in fsdp_units
        for module in named(trace, name, "FSDP unit")
        for outer in modules_around(trace, module)
    }
    if ac_units is None:
        return {number for number in range(len(trace.modules)) if number in parents and number not in above}
    found: set[int] = set()
    for name in ac_units:
        modules = named(trace, name, "AC unit")
        inner = [module for module in modules if module in parents]
        if not inner:
            raise OptionError(
                f"AC unit {name!r} has no modules inside; this solver checkpoints modules that do. "
                f"Name the module around it{_parent_hint(trace, modules[0])}, or use the regions solver."
            )
        if not above.isdisjoint(inner):
            raise OptionError(
                f"AC unit {name!r} lies around an FSDP unit; checkpoint the FSDP unit itself or a module "
                "inside of it, because FSDP gathers parameters again for each of its units."
            )
        found.update(inner)
    return found


def captured_units(trace: Trace, fsdp_units: Sequence[str], world_size: int) -> tuple[str, ...]:
    """Return the FSDP units of a captured rank; refuse others, and to divide what is divided already."""
    if world_size != 1:
        raise OptionError(
            f"a world size of {world_size} divides a step of one process, and this one is captured as a rank "
            "of a cluster; leave the world size out."
        )
    units = {number for number, module in enumerate(trace.modules) if module.unit and number != trace.model}
    for name in fsdp_units:
        if not units.issuperset(named(trace, name, "FSDP unit")):
            raise OptionError(
                f"FSDP unit {name!r} is none in the captured step, whose units are what fully_shard was "
                "called with; leave FSDP units out, or shard the model so."
            )
    return tuple(trace.modules[number].name for number in sorted(units))


def named(trace: Trace, name: str, role: str) -> list[int]:
    """Return the modules of a trace with this name."""
    return places_of([module.name for module in trace.modules], name, role)


def places_of(names: Sequence[str], name: str, role: str) -> list[int]:
    """Return where this name is; `*` is any one part of it, and the root's name may be left out."""
    pattern = name.split(".")
    found = [
        number
        for number, other in enumerate(names)
        for parts in [other.split(".")]
        if _matches(pattern, parts) or _matches(pattern, parts[1:])
    ]
    if not found:
        inner = [other.partition(".")[2] for other in names if "." in other]
        near = difflib.get_close_matches(name, inner, n=3) or inner[:3]
        raise OptionError(
            f"{role} {name!r} is not in the model; it has modules such as {', '.join(near)}. "
            "`trainfit estimate` lists them, and blocks.* means all that are numbered."
        )
    return found


def _matches(pattern: list[str], parts: list[str]) -> bool:
    return len(pattern) == len(parts) and all(a in ("*", b) for a, b in zip(pattern, parts))


def _parent_hint(trace: Trace, module: int) -> str:
    parent = trace.modules[module].parent
    return f", {trace.modules[parent].name}" if parent >= 0 else ""


def modules_around(trace: Trace, module: int) -> list[int]:
    """Return the modules that a module lies inside of, the innermost first."""
    found: list[int] = []
    while (module := trace.modules[module].parent) >= 0:
        found.append(module)
    return found
