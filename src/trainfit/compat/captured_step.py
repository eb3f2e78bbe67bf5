"""One capture of a step for the tools of `compat`: nothing is allocated, and kernels are the target's own.

captured = CapturedStep(build, device="a100-sxm-40gb")      the function that builds the `Step`
tracker = MemTracker.of(captured)
info = aggregate_stats(captured.model, tracker, RuntimeEstimator.of(captured), SACEstimator.of(captured),
                       captured.device)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import nn

from trainfit.api.predict import capture
from trainfit.capturing.modules import ModuleTable
from trainfit.capturing.observed_calls import Instant
from trainfit.capturing.observing import place_named
from trainfit.compat.seen_calls import Seen, SeenCall, SeenModule
from trainfit.compat.target_device import present_device
from trainfit.devices.device_table import Device
from trainfit.errors import OptionError
from trainfit.memory.history import history_of
from trainfit.steps.step import Step
from trainfit.traces.trace import ModuleCall, Trace


class CapturedStep:
    """A step that was captured once; `model` is the model that its build function made."""

    def __init__(self, build: Callable[[], Step], device: str | Device | None = None) -> None:
        """Capture the step for a device: the present one, if none is named."""
        if not callable(build):
            raise OptionError(
                f"a step is captured from the function that builds it, not from {type(build).__name__}: its "
                "tensors have to be made during the capture."
            )
        built: list[Step] = []

        def noted() -> Step:
            built[:] = [build()]
            return built[0]

        self.target = present_device(device)
        self.trace = capture(noted, device=self.target)
        self.model: nn.Module = built[0].model
        self.device: torch.device = place_named(self.trace.device)

    def seen(self) -> Seen:
        """Return what the tools read."""
        trace = self.trace
        history = history_of(trace)

        def instant(time: int) -> Instant:
            return Instant(time, history.releases_before(time))

        calls = [
            SeenCall(
                call.module,
                call.recompute,
                instant(call.forward_start),
                instant(call.forward_end),
                instant(call.backward_start) if call.backward_start >= 0 else None,
                instant(call.backward_end) if call.backward_start >= 0 else None,
                _given(trace, call),
                _returned(trace, call),
                has_tensors=bool(_given(trace, call)),
            )
            for call in trace.calls
        ]
        return Seen(instant(len(trace.ops)), {self.device: trace}, tuple(calls), self._modules())

    def _modules(self) -> tuple[SeenModule, ...]:
        table = ModuleTable()
        table.begin_with(self.model)
        entries = {entry.name: entry for entry in table.entries}
        numbers: dict[int, int] = {}
        """The storage of each parameter and buffer, by its id."""
        for module in self.trace.modules:
            entry = entries.get(module.name)
            if entry is not None:
                for tensors, owned in (
                    (entry.own_parameters, module.parameters),
                    (entry.own_buffers, module.buffers),
                ):
                    # What modules share is the first one's in a trace.
                    own = [tensor for tensor in tensors if id(tensor) not in numbers]
                    numbers.update((id(tensor), number) for tensor, number in zip(own, owned))

        def storages(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
            return tuple(dict.fromkeys(numbers[id(one)] for one in tensors if id(one) in numbers))

        found = []
        for module in self.trace.modules:
            entry = entries.get(module.name)
            inside = None if entry is None else entry.module
            if entry is None or inside is None:
                found.append(SeenModule(module.name, _GONE, module.parameters, module.buffers))
            else:
                held = storages(inside.parameters()), storages(inside.buffers())
                found.append(SeenModule(module.name, entry.reference, *held))
        return tuple(found)


def _given(trace: Trace, call: ModuleCall) -> tuple[int, ...]:
    """Return the storages that a call reads and that are neither made inside nor the model's own."""
    inside = range(call.forward_start, call.forward_end)
    read = dict.fromkeys(storage for op in inside for storage in trace.ops[op].reads)
    own = ("parameter", "buffer")
    return tuple(
        s for s in read if trace.storages[s].producer not in inside and trace.storages[s].category not in own
    )


def _returned(trace: Trace, call: ModuleCall) -> tuple[int, ...]:
    """Return the storages that a call makes and that the rest of forward reads."""
    inside = range(call.forward_start, call.forward_end)
    made = [storage for op in inside for storage in trace.ops[op].creates]
    return tuple(
        storage
        for storage in made
        if any(
            reader >= call.forward_end and trace.ops[reader].phase == "forward"
            for reader in trace.readers[storage]
        )
    )


class _Nothing(nn.Module):
    """What a module that is gone refers to."""


_GONE: weakref.ref[nn.Module] = weakref.ref(_Nothing())
