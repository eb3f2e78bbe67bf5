"""What a compiler saves: pointwise kernels and reductions that need each other run as one.

Two ops may be one kernel if no product, attention or collective has to run between them; one that only
happens to run there is no hindrance. So every op has a level: how many of those that nothing is fused with
lead to it. Ops of one level in one compiled graph (a block's forward, or its backward) that use the same
storage are a kernel: it reads each storage that was made outside of it once, and writes those of its own that
others use. What it makes and uses itself never leaves the chip. A kernel's latency counts once for each
reduction, which ends a loop, and once for the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from trainfit.costs.collective_costs import COMMUNICATION
from trainfit.costs.schedule import Schedule, with_device_seconds
from trainfit.devices.efficiency import Constants
from trainfit.traces.trace import COMPUTE, Op, Trace

_ALONE = ("products", "attention", COMMUNICATION)
"""Kinds of kernels, by how they begin, that nothing is fused with."""


def compiled(times: Schedule, constants: Constants, part: str) -> Schedule:
    """Return the schedule of the same step, of which modules with `part` in their name are compiled."""
    trace, device = times.trace, times.device_seconds.copy()
    users = _users(times)
    bandwidth = times.costs.device.bandwidth_bytes_per_second or 1.0
    share = constants.memory_share * constants.reduction_share
    for group in _groups(times, part):
        kinds = [times.costs.costs[trace.ops[number].signature].kind for number in group]
        moved = _moved_bytes(trace, group, users)
        kernels = 1 + sum(kind == "reductions" for kind in kinds)
        seconds = moved / (bandwidth * share) + kernels * constants.kernel_seconds
        before = float(device[group].sum())
        if seconds < before:
            device[group] = device[group] * (seconds / before)
    return with_device_seconds(times, device)


def _groups(times: Schedule, part: str) -> Iterator[list[int]]:
    """Yield the ops of each kernel that has several of them."""
    trace, costs = times.trace, times.costs.costs
    level_after: dict[int, int] = defaultdict(int)
    """For each storage: the level of what reads it."""
    kernel_of: dict[tuple[str, int, int], list[int]] = {}
    """For a graph, a level and a storage: the ops so far of the kernel that uses it."""
    kernels: list[list[int]] = []
    for number, op in enumerate(trace.ops):
        kind = costs[op.signature].kind
        if not kind or (op.queue != COMPUTE and not op.exchange):
            continue  # no kernel, or a copy that nothing waits for here
        used = {*op.reads, *op.writes}
        level = max((level_after[storage] for storage in used), default=0)
        graph = _graph(trace, op, part)
        fused = bool(graph) and not op.exchange and not kind.startswith(_ALONE)
        for storage in (*op.creates, *op.writes):
            level_after[storage] = level if fused else level + 1
        if not fused:
            continue
        found = {id(kernel): kernel for one in used if (kernel := kernel_of.get((graph, level, one)))}
        own = min(found.values(), key=lambda kernel: kernel[0], default=[])
        if not own:
            kernels.append(own)
        for other in found.values():
            if other is not own:
                kernel_of.update({key: own for key, kernel in kernel_of.items() if kernel is other})
                own += other
                other.clear()
        own.append(number)
        kernel_of.update({(graph, level, storage): own for storage in (*used, *op.creates)})
    yield from (sorted(kernel) for kernel in kernels if len(kernel) > 1)


def _graph(trace: Trace, op: Op, part: str) -> str:
    """Return the name of what is compiled by itself and has this op; nothing if it is not compiled."""
    if op.module < 0 or op.phase == "optimizer":
        return ""
    name = trace.modules[op.module].name
    if part not in name:
        return ""
    before, found, after = name.partition(part) if part else ("", "", "")
    return f"{op.phase} {before}{found}{after.split('.')[0]}"


def _moved_bytes(trace: Trace, group: list[int], users: dict[int, set[int]]) -> int:
    inside = set(group)
    made: set[int] = set()
    read: set[int] = set()
    for number in group:
        op = trace.ops[number]
        read.update(storage for storage in op.reads if storage not in made)
        made.update((*op.creates, *op.writes))
    kept = {one for one in made if trace.storages[one].end is None or users[one] - inside}
    return sum(trace.storages[storage].bytes for storage in (*read, *kept))


def _users(times: Schedule) -> dict[int, set[int]]:
    """Return the ops with kernels that read or write each storage: views do not."""
    found: dict[int, set[int]] = defaultdict(set)
    for number, op in enumerate(times.trace.ops):
        if times.costs.costs[op.signature].kind:
            for storage in (*op.reads, *op.writes):
                found[storage].add(number)
    return found
