"""The step of one of several processes under FSDP: what is divided among them, and what is gathered anew.

Parameters, gradients and optimizer state are divided evenly. Before a unit runs its parameters are gathered,
and those of the next unit meanwhile; the root's own parameters, which no named unit has, stay gathered from
the beginning of forward to the end of backward, and their gradients are reduced last. So on top of the parts
there are at once

- in forward and backward: the parameters of the root and of the two largest other units,
- in backward also: the gradients of the root and of the largest other unit, before they are reduced.

Which units run when is not followed: the sums count over the whole of forward and backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainfit.basics.units import format_bytes
from trainfit.memory.module_stats import gradient_modules
from trainfit.planning.modules.unit_names import modules_around, named
from trainfit.traces.trace import Interval, Storage, Trace

STATES = ("parameter", "gradient", "optimizer_state")
"""What the processes divide among themselves."""
_ROOT = -1
_GATHERED_AT_ONCE = 2
"""The unit that runs and the next one."""


@dataclass(frozen=True)
class Gathered:
    """Bytes that a process has whole for a while, besides its parts."""

    parameter_bytes: int
    gradient_bytes: int


def gathered_by(trace: Trace, fsdp_units: Sequence[str]) -> Gathered:
    """Return what is whole at once at most; without units the whole model is one."""
    sharded = {module for name in fsdp_units for module in named(trace, name, "FSDP unit")}

    def unit_of(module: int) -> int:
        return next((outer for outer in (module, *modules_around(trace, module)) if outer in sharded), _ROOT)

    parameters, gradients = Counter[int](), Counter[int]()
    for number, module in enumerate(trace.modules):
        parameters[unit_of(number)] += sum(trace.storages[s].bytes for s in module.parameters)
    for storage, maker in gradient_modules(trace):
        gradients[unit_of(maker)] += trace.storages[storage].bytes
    return Gathered(_root_and_largest(parameters, _GATHERED_AT_ONCE), _root_and_largest(gradients, 1))


def _root_and_largest(sizes: Counter[int], count: int) -> int:
    root = sizes.pop(_ROOT, 0)
    return root + sum(size for _, size in sizes.most_common(count))


def with_gathered(trace: Trace, gathered: Gathered) -> Trace:
    """Return the step with what is gathered as storages that no operator has made."""
    forward = [number for number, op in enumerate(trace.ops) if op.phase == "forward"]
    backward = [number for number, op in enumerate(trace.ops) if op.phase == "backward"]
    found: list[Storage] = []
    if forward and gathered.parameter_bytes:
        end = max(forward[-1], backward[-1] if backward else -1) + 1
        found.append(_communicated(gathered.parameter_bytes, forward[0], end))
    if backward and gathered.gradient_bytes:
        found.append(_communicated(gathered.gradient_bytes, backward[0], backward[-1] + 1))
    return replace(trace, storages=(*trace.storages, *found), observed_peak_bytes=None)


def _communicated(size: int, start: int, end: int) -> Storage:
    return Storage(size, "communication", -1, start, end, (Interval("program", start, end),))


def divided(trace: Trace, world_size: int) -> Trace:
    """Return the step with the part of parameters, gradients and optimizer state that one process has."""
    if world_size == 1:
        return trace

    def part(size: int) -> int:
        return -(-size // world_size)

    def divided_storage(storage: Storage) -> Storage:
        resizes = tuple((when, part(size)) for when, size in storage.resizes)
        return replace(storage, bytes=part(storage.bytes), resizes=resizes)

    storages = [divided_storage(s) if s.category in STATES else s for s in trace.storages]
    return replace(trace, observed_peak_bytes=None, storages=tuple(storages))


def what_is_divided(gathered: Gathered, world_size: int) -> str:
    """Say what a world size changes in the figures, and what it does not."""
    return (
        f"the figures are for one of {world_size} processes: parameters, gradients and optimizer state are "
        f"divided evenly. On top of them are what FSDP gathers, {format_bytes(gathered.parameter_bytes)} of "
        "parameters (the root's own, the unit that runs and the next one, the largest of them), and "
        f"{format_bytes(gathered.gradient_bytes)} of gradients before they are reduced. Not in them: copies "
        "that the collectives make, and the time of communication"
    )
