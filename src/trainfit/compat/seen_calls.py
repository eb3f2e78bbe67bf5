"""What the tools of `compat` read: traces, and what is known of module calls besides them.

It comes from an observation of code that runs, or from one capture of a step (`captured_step.py`).
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from trainfit.capturing.observed_calls import Instant
from trainfit.capturing.observing import Observation, place_named
from trainfit.memory.history import MemoryHistory, history_of
from trainfit.traces.trace import Trace


@dataclass(frozen=True)
class SeenCall:
    """One call of a module. Storages are numbers in the traces."""

    module: int
    recompute: bool
    entered: Instant
    left: Instant
    backward_began: Instant | None
    backward_ended: Instant | None
    given: tuple[int, ...]
    returned: tuple[int, ...]
    has_tensors: bool


@dataclass(frozen=True)
class SeenModule:
    """A module with everything inside of it."""

    name: str
    reference: weakref.ref[nn.Module]
    parameters: tuple[int, ...]
    buffers: tuple[int, ...]


@dataclass(frozen=True)
class Seen:
    """Everything that was seen up to a moment."""

    now: Instant
    traces: dict[torch.device, Trace]
    """One for each device that anything was on: storages of others have no bytes."""
    calls: tuple[SeenCall, ...]
    modules: tuple[SeenModule, ...]

    @property
    def trace(self) -> Trace:
        """The trace of the device that was seen first."""
        return next(iter(self.traces.values()))

    @cached_property
    def histories(self) -> dict[torch.device, MemoryHistory]:
        """Bytes at any moment, for each device."""
        return {device: history_of(trace) for device, trace in self.traces.items()}

    def bytes_of(self, storages: tuple[int, ...]) -> int:
        """Return what storages take, on whatever device they are."""
        return sum(trace.occupied_bytes[number] for trace in self.traces.values() for number in storages)


def seen_by(observation: Observation) -> Seen:
    """Return what an observation has seen so far."""
    devices = observation.devices()
    traces = {device: observation.trace(device) for device in devices}
    if not traces:
        only = observation.trace()
        traces = {place_named(only.device): only}
    now = observation.now()
    calls = [
        SeenCall(
            recorded.module,
            recorded.recompute,
            call.entered,
            call.left or now,
            call.backward_began,
            call.backward_ended,
            tuple(live.index for live in call.given),
            tuple(live.index for live in call.returned),
            call.has_tensors,
        )
        for recorded, call in zip(observation.recorder.calls, observation.calls)
    ]
    modules = []
    for entry in observation.modules.entries:
        held = ([], []) if entry.module is None else (entry.module.parameters(), entry.module.buffers())
        owned = (tuple(live.index for live in observation.storages_of(list(tensors))) for tensors in held)
        modules.append(SeenModule(entry.name, entry.reference, *owned))
    return Seen(now, traces, tuple(calls), tuple(modules))
