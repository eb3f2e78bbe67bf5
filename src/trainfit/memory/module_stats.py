"""What each module needs, read off the timeline: parameters, gradients, activations and its peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainfit.traces.simulate import Timeline
from trainfit.traces.trace import Trace


@dataclass(frozen=True)
class ModuleStats:
    """One module with everything below it. Bytes are predicted; seconds are None until costs exist."""

    name: str
    class_name: str
    depth: int
    calls: int
    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    activation_bytes: int
    """What its forward left alive for backward: activations made inside that outlive the call."""
    peak_bytes: int
    """Bytes alive on the device, of whatever kind, when the module's own work needs the most."""
    at_peak_bytes: int
    """Bytes made inside the module that are alive at the peak of the whole step."""
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    whole_parameter_bytes: int = 0
    """Of a step of several ranks: its parameters on all of them, each counted once."""


def module_stats(timeline: Timeline) -> tuple[ModuleStats, ...]:
    """Sum up every module with what is below it; linear in ops, storages and the depth of the tree."""
    trace = timeline.trace
    count = len(trace.modules)
    parameters = [sum(trace.occupied_bytes[s] for s in module.parameters) for module in trace.modules]
    wholes = [module.whole_parameter_bytes or own for module, own in zip(trace.modules, parameters)]
    buffers = [sum(trace.occupied_bytes[s] for s in module.buffers) for module in trace.modules]
    depths: list[int] = []
    for module in trace.modules:
        depths.append(depths[module.parent] + 1 if module.parent >= 0 else 0)
    gradients, activations, at_peak = [0] * count, [0] * count, [0] * count
    calls = Counter(call.module for call in trace.calls if not call.recompute)
    for number, maker in gradient_modules(trace):
        gradients[maker] += trace.occupied_bytes[number]
    for number, storage in enumerate(trace.storages):
        if storage.producer < 0 or trace.ops[storage.producer].module < 0:
            continue
        op = trace.ops[storage.producer]
        if storage.category == "activation" and any(True for _ in storage.held_by("autograd")):
            activations[op.module] += 0 if op.recompute else trace.occupied_bytes[number]
        if storage.alive_at(timeline.peak_op):
            at_peak[op.module] += trace.occupied_at(number, timeline.peak_op)
    # Children come after their parents, so one pass from the end adds every module to its ancestors.
    peaks = _own_peaks(timeline)
    for number in reversed(range(count)):
        parent = trace.modules[number].parent
        if parent >= 0:
            peaks[parent] = max(peaks[parent], peaks[number])
            for column in (parameters, wholes, buffers, gradients, activations, at_peak):
                column[parent] += column[number]
    return tuple(
        ModuleStats(
            name=module.name,
            class_name=module.class_name,
            depth=depths[number],
            calls=calls[number],
            parameter_bytes=parameters[number],
            buffer_bytes=buffers[number],
            gradient_bytes=gradients[number],
            activation_bytes=activations[number],
            peak_bytes=peaks[number],
            at_peak_bytes=at_peak[number],
            whole_parameter_bytes=wholes[number],
        )
        for number, module in enumerate(trace.modules)
    )


def with_seconds(timeline: Timeline, seconds: Sequence[tuple[float, float]]) -> tuple[ModuleStats, ...]:
    """Sum up every module, with its seconds of forward and backward."""
    return tuple(
        replace(module, forward_seconds=forward, backward_seconds=backward)
        for module, (forward, backward) in zip(module_stats(timeline), seconds)
    )


def gradient_modules(trace: Trace) -> Iterator[tuple[int, int]]:
    """Yield each gradient with the module whose backward makes it.

    A gradient that is there before the step (accumulated over steps, or only set to zero between them) is
    made by none of its ops: it belongs to the module whose backward first adds to it.
    """
    adding: dict[int, int] = {}
    for op in trace.ops:
        if op.phase == "backward" and op.module >= 0:
            for number in op.writes:
                adding.setdefault(number, op.module)
    for number, storage in enumerate(trace.storages):
        if storage.category == "gradient":
            made_by = trace.ops[storage.producer].module if storage.producer >= 0 else adding.get(number, -1)
            if made_by >= 0:
                yield number, made_by


def _own_peaks(timeline: Timeline) -> list[int]:
    """Return for each module the most bytes used while any op of it runs, without the modules below it."""
    trace = timeline.trace
    peaks = np.zeros(len(trace.modules) + 1, dtype=np.int64)
    modules = np.fromiter((op.module for op in trace.ops), dtype=np.int64, count=len(trace.ops))
    np.maximum.at(peaks, modules, timeline.used_bytes)  # module -1 lands in the last place
    return [int(peak) for peak in peaks[:-1]]
