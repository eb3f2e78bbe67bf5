"""What the host takes per call, and how long a kernel takes to start: beside a GPU, or on the CPU itself."""

from __future__ import annotations

import statistics
import time

import torch

from trainfit.basics.doing import doing
from trainfit.calibrating.instrument import Instrument
from trainfit.calibrating.solving import Solved
from trainfit.timing.executor_seconds import region_seconds
from trainfit.timing.host import half_quartiles, issuing_seconds, measure_host

_LAUNCHES = 200


def host_constants(instrument: Instrument, kernel_seconds: float) -> dict[str, Solved]:
    """Return the constants of the host by their names; those that came out below zero are left out.

    `kernel_seconds` is what the smallest kernel takes on the device.
    """
    doing("measuring what the host takes per operator")
    if instrument.kind == "cpu":
        found = measure_host()
        seconds, spreads = found.seconds, found.spreads
    else:
        found = issuing_seconds(instrument.device, instrument.place, instrument.synchronize)
        times = _launch_times(instrument, kernel_seconds)
        launch = statistics.median(times)
        # Running regions under a plan is Python, whatever the device: measured on the host.
        seconds = {**found.seconds, "launch": launch, **region_seconds()}
        spreads = {**found.spreads, "launch": half_quartiles(times) / abs(launch or 1.0)}
    return {name: Solved(figure, spreads.get(name)) for name, figure in seconds.items() if figure > 0}


def _launch_times(instrument: Instrument, kernel_seconds: float) -> list[float]:
    """Return how long it takes from a call until an idle device has run its kernel, less call and kernel."""
    tiny = torch.zeros(16, device=instrument.place)
    calls: list[float] = []
    ends: list[float] = []
    for _ in range(_LAUNCHES):
        instrument.synchronize()
        begin = time.perf_counter()
        torch.add(tiny, 1.0)
        called = time.perf_counter()
        instrument.synchronize()
        ends.append(time.perf_counter() - begin)
        calls.append(called - begin)
    call = statistics.median(calls)
    return [end - call - kernel_seconds for end in ends]
