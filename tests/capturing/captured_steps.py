"""Capture a step in a test, and ask the trace about it in few words."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainfit.capturing import capture, session
from trainfit.capturing.left_as_found import FoundState
from trainfit.capturing.metadata import MetadataOracle
from trainfit.capturing.random_stream import seeded
from trainfit.devices.device_table import Device
from trainfit.steps.step import Step
from trainfit.traces.simulate import simulate
from trainfit.traces.trace import Interval, Signature, Storage, Trace
from trainfit.verifying.measuring import Measurement, measure_step
from trainfit.workspace.measured import QUICK, THOROUGH, Limits

Build = Callable[[], Step]


def captured(build: Build, device: str | Device = "cpu", limits: Limits = QUICK) -> Trace:
    """Return the trace of the step that `build` makes."""
    gc.collect()
    return capture(build, device=device, limits=limits)


@dataclass(frozen=True)
class Recorded:
    """A trace without workspaces, and what the recorder counted while it ran: bytes alive during each op."""

    trace: Trace
    live_bytes: tuple[int, ...]


def recorded(build: Build, device: str = "cpu", limits: Limits = QUICK) -> Recorded:
    """Capture a step as `capture` does, and keep the recorder's own figures."""
    gc.collect()
    before, oracle, traces = FoundState(), MetadataOracle(device), None
    try:
        while traces is None:
            recording = session.Session(device, oracle)
            traces = session._attempt(build, recording, "recorded", limits, before, steps=1)
    finally:
        before.put_back()
    return Recorded(traces[0], tuple(row.live_bytes for row in recording.recorder.rows))


def predicted_and_measured(build: Build) -> tuple[Measurement, Measurement]:
    """Return what the capture predicts and what a real run does, as (peak, persistent) without seconds."""
    trace = captured(build, limits=THOROUGH)
    timeline = simulate(trace)
    real = measure_step(build, "cpu", steps=trace.steps)
    predicted = Measurement(timeline.peak_bytes, timeline.persistent_bytes, 0.0)
    return predicted, Measurement(real.peak_bytes, real.persistent_bytes, 0.0)


def assert_exact(build: Build) -> None:
    """The predicted peak and persistent bytes are those of a real run on this machine."""
    predicted, real = predicted_and_measured(build)
    assert predicted == real


def training(
    make_model: Callable[[], nn.Module],
    *shape: int,
    loss: Callable[[Any], torch.Tensor] = torch.sum,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> Build:
    """Return a function that builds the plainest step: one random input, a loss, an optimizer."""

    def build() -> Step:
        model, inputs = make_model(), torch.randn(*shape)
        chosen = optimizer(model.parameters(), lr=0.1)

        def run() -> torch.Tensor:
            value = loss(model(inputs))
            value.backward()
            chosen.step()
            chosen.zero_grad()
            return value

        return Step(model, chosen, run)

    return build


def inside(question: Callable[[], Any], device: str | Device = "cpu") -> Any:
    """Return what `question` answers while a capture runs."""
    recording = session.Session(device)
    gc.collect()
    with seeded(), recording.active():
        return question()


# Asking a trace -------------------------------------------------------------------------------------------


def base_name(name: str) -> str:
    """Return `addmm` for `aten.addmm.default`."""
    parts = name.split(".")
    return parts[1] if parts[0] == "aten" else name


def ops(
    trace: Trace, name: str = "", *, phase: str = "", module: str = "", recompute: bool | None = None
) -> list[int]:
    """Return the numbers of the ops with this name, in this phase, of this module."""
    return [
        number
        for number, op in enumerate(trace.ops)
        if name in ("", base_name(trace.op_name(number)))
        and phase in ("", op.phase)
        and module in ("", trace.module_name(op.module))
        and recompute in (None, op.recompute)
    ]


def only_op(trace: Trace, name: str, **where: Any) -> int:
    """Return the number of the one op with this name."""
    found = ops(trace, name, **where)
    assert len(found) == 1, f"{len(found)} ops called {name}: {op_names(trace)}"
    return found[0]


def op_names(trace: Trace, numbers: Sequence[int] | None = None, *, views: bool = True) -> list[str]:
    """Return the names of ops, of all or of some; without views if told so."""
    chosen = range(len(trace.ops)) if numbers is None else numbers
    return [base_name(trace.op_name(n)) for n in chosen if views or not signature(trace, n).view]


def signature(trace: Trace, op: int) -> Signature:
    """Return what op number `op` was called with."""
    return trace.signatures[trace.ops[op].signature]


def result_of(trace: Trace, op: int) -> int:
    """Return the number of the one storage that an op made."""
    (created,) = trace.ops[op].creates
    return created


def result(trace: Trace, op: int) -> Storage:
    """Return the one storage that an op made."""
    return trace.storages[result_of(trace, op)]


def times(intervals: Any) -> list[tuple[int, int | None]]:
    """Return intervals as plain pairs."""
    return [(interval.start, interval.end) for interval in intervals]


def held(storage: Storage, holder: str) -> list[tuple[int, int | None]]:
    """Return when a kind of holder held a storage."""
    chosen: list[Interval] = list(storage.held_by(holder))
    return times(chosen)


def of_category(trace: Trace, category: str) -> list[Storage]:
    """Return all storages of a category."""
    return [storage for storage in trace.storages if storage.category == category]


def bytes_of(trace: Trace, category: str) -> int:
    """Return what all storages of a category take together."""
    return sum(trace.memory.occupied(storage.bytes) for storage in of_category(trace, category))


def owned_bytes(trace: Trace, owned: tuple[int, ...]) -> int:
    """Return what the parameters or buffers of a module take together."""
    return sum(trace.occupied_bytes[storage] for storage in owned)


def show(trace: Trace) -> str:
    """Write a trace out, for the message of a failed test."""
    lines = []
    for number, op in enumerate(trace.ops):
        again = " again" if op.recompute else ""
        name = base_name(trace.op_name(number))
        lines.append(
            f"{number:4} {op.phase:9}{again} {trace.module_name(op.module):24} {name:28} "
            f"reads {op.reads} writes {op.writes} creates {op.creates} for {op.forward_op}"
        )
    for number, storage in enumerate(trace.storages):
        holders = " ".join(f"{h.holder}[{h.start},{h.end})" for h in storage.holders)
        lines.append(f"{number:4} {storage.category:15} {storage.bytes:8} {holders} {storage.resizes or ''}")
    return "\n".join(lines)
