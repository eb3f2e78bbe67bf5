"""Stand-ins for a GPU: one that runs on the CPU and pretends, and a clock that knows what one would take."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from trainfit.calibrating.instrument import GPU_SIZES, Instrument
from trainfit.calibrating.probes import Probe, ProbeSizes
from trainfit.calibrating.probing import Key, matmul_tf32
from trainfit.calibrating.questions import groups_for
from trainfit.calibrating.solving import PricedProbes
from trainfit.devices.device_table import Device
from trainfit.devices.efficiency import Constants
from trainfit.devices.hardware import Cuda, GpuProperties

SMALL = ProbeSizes(side=128, stream_bytes=1 << 16, images=1, pixels=8, sequences=1, tokens=16)


class PretendEvent:
    """Knows when it was recorded: on a CPU everything before it is done then."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.seconds = 0.0

    def record(self) -> None:
        """Note the time."""
        self._log.append("record")
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing is left to be done."""
        self._log.append("wait")

    def elapsed_time(self, end: PretendEvent) -> float:
        """Return milliseconds, as torch does."""
        return 1e3 * (end.seconds - self.seconds)


class PretendGpu(Cuda):
    """Two GPUs whose tensors are on the CPU; what is asked of them is noted in `log`."""

    def __init__(self, names: Sequence[str] = ("NVIDIA H100 80GB HBM3", "NVIDIA Q9999")) -> None:
        self.log: list[str] = []
        self.names = names
        self.number = 0
        self.used, self.reserved, self.free = 900 << 20, 500 << 20, 8 << 30

    def count(self) -> int:
        return len(self.names)

    def properties(self, number: int = 0) -> GpuProperties:
        return GpuProperties(self.names[number], 16 << 30, 1 << 20, 132, "sm_90")

    def free_bytes(self) -> int:
        return self.free

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def event(self) -> PretendEvent:
        return PretendEvent(self.log)

    def sleep(self, cycles: int) -> None:
        self.log.append("sleep")

    def current(self) -> int:
        return self.number

    def use(self, number: int) -> None:
        self.log.append(f"use {number}")
        self.number = number

    def place(self) -> str:
        return "cpu"

    def used_bytes(self) -> int:
        return self.used

    def reserved_bytes(self) -> int:
        return self.reserved

    def let_go(self) -> None:
        self.log.append("let go")

    def driver(self) -> str:
        return "570.12.1"


_captured: dict[object, PricedProbes] = {}


def captured_once(probes: Sequence[Probe], device: Device) -> PricedProbes:
    """Return priced probes as they are, captured once for all devices on which they are the same."""
    same = tuple((probe.name, probe.tensors) for probe in probes)
    key = (same, device.kind, device.architecture, torch.backends.cuda.matmul.allow_tf32)
    if key not in _captured:
        _captured[key] = PricedProbes(probes, device)
    return _captured[key]


class KnowingClock:
    """Times probes by the roofline with constants that the test chooses; nothing is computed."""

    def __init__(self, device: Device, constants: Constants, outliers: float = 0.0) -> None:
        """A share of the calls takes ten times as long, as when another program interrupts."""
        self.device, self.constants = device, constants
        self._outliers = outliers
        self._random = random.Random(0)
        self._prices: dict[Key, float] = {}

    def instrument(self, known: Device, rates: tuple[str, ...], groups: int | None = None) -> Instrument:
        """Return an instrument for a device as it is known before, whose tensors have no memory.

        It can measure so many of the groups.
        """
        sizes = replace(GPU_SIZES, cache_bytes=self.device.cache_bytes or 0)
        found = Instrument(known, "meta", self.timed, sizes, rates, PretendGpu())
        for group in groups_for(found)[:groups]:
            probes = group.make(sizes)
            for rounded in {probe.rate == "tf32" for probe in probes}:
                self._price([probe for probe in probes if (probe.rate == "tf32") is rounded], rounded)
        return found

    def _price(self, probes: Sequence[Probe], rounded: bool) -> None:
        with matmul_tf32(rounded):
            priced = captured_once(probes, self.device)
        for probe in probes:
            for phase in ("forward", "backward") if probe.backward else ("forward",):
                self._prices[probe.name, phase] = priced.seconds(
                    (probe.name, phase), self.device, self.constants
                )

    def timed(self, function: Any, positional: list[Any], keyword: dict[str, Any]) -> tuple[float, Any]:
        """Return what the call would take, with noise; nothing for what is no probe."""
        key = getattr(function, "key", None)
        noise = 10.0 if self._random.random() < self._outliers else 1.0
        return (0.0 if key is None else self._prices[key] * noise), None
