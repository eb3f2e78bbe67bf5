"""What a compiler saves: pointwise kernels and reductions between two products run as one.

A group is what lies between two products, attentions or collectives in a row on the compute queue, inside of
what is compiled. It reads each storage that was made outside of it once, and writes those of its own that are
used after it. What it makes and uses itself never leaves the chip. A kernel's latency counts once for each
reduction, which ends a loop, and once for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainfit.costs.collective_costs import COMMUNICATION
from trainfit.costs.schedule import Schedule, Seconds, with_device_seconds
from trainfit.devices.efficiency import Constants
from trainfit.traces.trace import COMPUTE, Trace

_ALONE = ("products", "attention", COMMUNICATION, "")
"""Kinds of kernels, by how they begin, that nothing is fused with; the last runs no kernel at all."""


def compiled(times: Schedule, constants: Constants, part: str) -> Schedule:
    """Return the schedule of the same step, of which modules with `part` in their name are compiled."""
    trace, device = times.trace, times.device_seconds.copy()
    last_use = _last_uses(trace)
    bandwidth = times.costs.device.bandwidth_bytes_per_second or 1.0
    share = constants.memory_share * constants.reduction_share
    for group in _groups(times, part):
        kinds = [times.costs.costs[trace.ops[number].signature].kind for number in group]
        moved = _moved_bytes(trace, group, last_use)
        kernels = 1 + sum(kind == "reductions" for kind in kinds)
        seconds = moved / (bandwidth * share) + kernels * constants.kernel_seconds
        before = float(device[group].sum())
        if seconds < before:
            device[group] = device[group] * (seconds / before)
    return with_device_seconds(times, device)


def _groups(times: Schedule, part: str) -> Iterator[list[int]]:
    trace, costs = times.trace, times.costs.costs
    group: list[int] = []
    for number, op in enumerate(trace.ops):
        if op.queue != COMPUTE:
            continue
        kind = costs[op.signature].kind
        inside = op.module >= 0 and part in trace.modules[op.module].name and op.phase != "optimizer"
        if inside and not op.exchange and kind and not kind.startswith(_ALONE[:-1]):
            group.append(number)
        elif kind or not inside:
            if len(group) > 1:
                yield group
            group = []
    if len(group) > 1:
        yield group


def _moved_bytes(trace: Trace, group: list[int], last_use: Seconds) -> int:
    made: set[int] = set()
    read: set[int] = set()
    for number in group:
        op = trace.ops[number]
        read.update(storage for storage in op.reads if storage not in made)
        made.update(op.creates)
        made.update(op.writes)
    kept = {storage for storage in made if last_use[storage] > group[-1]}
    return sum(trace.storages[storage].bytes for storage in read) + sum(
        trace.storages[storage].bytes for storage in kept
    )


def _last_uses(trace: Trace) -> Seconds:
    found = np.full(len(trace.storages), -1.0)
    for number, op in enumerate(trace.ops):
        for storage in (*op.reads, *op.writes):
            found[storage] = number
    for number, storage_ in enumerate(trace.storages):
        if storage_.end is None:
            found[number] = np.inf
    return found
