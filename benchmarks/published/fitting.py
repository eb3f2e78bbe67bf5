"""Fit constants of the roofline on captured rows: what each price depends on is found by looking.

A price is computed again only if a constant that it reads has moved; so a fit over hundreds of steps takes
minutes, with the code that prices steps for users.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import numpy as np

from trainfit.costs.constants import CALIBRATED
from trainfit.costs.roofline import FREE, Roofline, host_of
from trainfit.costs.schedule import issue_seconds
from trainfit.devices.device_table import Device
from trainfit.devices.efficiency import Constants
from trainfit.operators.call_contents import contents_of
from trainfit.traces.trace import Trace

from .prediction import sharded_optimizer_seconds
from .rows import Row

EVERYWHERE = "*"
Key = tuple[str, str]
"""Where a constant holds (everywhere, an architecture, a device), and its name."""
Point = dict[Key, float]
Limits = dict[Key, tuple[float, float]]
_FIRST_STEP = 1.25
_LAST_STEP = 1.01


class _Recorder:
    """The constants of a device; remembers which were read."""

    def __init__(self, values: Constants) -> None:
        self.values = values
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.values, name)


class _Sample:
    """A row with the seconds of its distinct operators."""

    def __init__(self, row: Row, trace: Trace) -> None:
        self.row, self.trace = row, trace
        self.scopes = (EVERYWHERE, row.device.architecture, row.device.name)
        counts = Counter(op.signature for op in trace.ops)
        free = Roofline(row.device, CALIBRATED, trace.tf32)
        used = [n for n in counts if free.price(trace.signatures[n]) is not FREE]
        self.calls = [(trace.signatures[number], contents_of(trace.signatures[number])) for number in used]
        self.counts = np.array([counts[number] for number in used], dtype=float)
        self.seconds = np.zeros(len(used))
        self.host = 0.0
        self.readers: dict[str, list[int]] = {}

    def reprice(self, point: Point, moved: str | None = None) -> None:
        """Price all operators, or those that read the constant that has moved."""
        device, values = constants_at(point, self.row.device)
        if moved in _HOST or moved is None:
            self.host = float(issue_seconds(self.trace, host_of(values)).sum())
        tf32 = self.trace.tf32
        if moved is not None:
            model = Roofline(device, values, tf32)
            for number in self.readers.get(moved, ()):
                self.seconds[number] = model.price_contents(*self.calls[number]).seconds
            return
        self.readers.clear()
        recorder = _Recorder(values)
        model = Roofline(device, cast(Constants, recorder), tf32)
        for number, (signature, contents) in enumerate(self.calls):
            recorder.read.clear()
            self.seconds[number] = model.price_contents(signature, contents).seconds
            on_peak = {"matmul_share"} if "in_step_share" in recorder.read else set()
            for name in recorder.read | on_peak:
                self.readers.setdefault(name, []).append(number)

    def error(self, point: Point) -> float:
        """Return log(predicted / published). The busier of host and device decides."""
        seconds = max(float(self.counts @ self.seconds), self.host)
        seconds *= self.row.data["config"].get("grad_accum", 1)
        seconds += sharded_optimizer_seconds(self.row, constants_at(point, self.row.device)[1])
        return math.log(seconds / self.row.measured_seconds)


_HOST = ("host_factor",)


def constants_at(point: Point, device: Device) -> tuple[Device, Constants]:
    """Return the device as the point has it, and the constants that hold for it."""
    found: dict[str, float] = {}
    for scope in (EVERYWHERE, device.architecture, device.name):
        found |= {name: value for (where, name), value in point.items() if where == scope}
    share = found.pop("matmul_share", device.matmul_share)
    return dataclasses.replace(device, matmul_share=share), dataclasses.replace(CALIBRATED, **found)


class Fit:
    """A point, and the errors of all samples at it."""

    def __init__(self, samples: list[tuple[Row, Trace]], point: Point, limits: Limits) -> None:
        self.samples = [_Sample(row, trace) for row, trace in samples]
        self.point, self.limits = dict(point), limits
        for sample in self.samples:
            sample.reprice(self.point)
        # What an architecture would have of its own stays the general figure where no row is about it.
        self.point = {key: value for key, value in self.point.items() if self._is_read(key)}
        for sample in self.samples:
            sample.reprice(self.point)
        self.errors = np.array([sample.error(self.point) for sample in self.samples])
        self.weights = _weights(self.samples)

    def _is_read(self, key: Key) -> bool:
        scope, name = key
        return scope == EVERYWHERE or any(
            scope in sample.scopes and (name in sample.readers or name in _HOST) for sample in self.samples
        )

    @property
    def loss(self) -> float:
        """The mean error over families, each weighted by the root of its size."""
        return float(self.weights @ np.abs(self.errors))

    def improve(self, keys: Iterable[Key] | None = None, *, deadline: float = math.inf) -> None:
        """Move one coordinate at a time, by smaller and smaller factors, while it helps."""
        factors = dict.fromkeys(self.point if keys is None else keys, _FIRST_STEP)
        while max(factors.values(), default=0.0) > _LAST_STEP and time.monotonic() < deadline:
            for key, factor in factors.items():
                if factor > _LAST_STEP and not (self._try(key, factor) or self._try(key, 1 / factor)):
                    factors[key] = 1 + (factor - 1) / 2
            print(f"  loss {self.loss:.4f}", file=sys.stderr, flush=True)

    def _try(self, key: Key, factor: float) -> bool:
        least, most = self.limits.get(key, (0.0, math.inf))
        value = min(max(self.point[key] * factor, least), most)
        if value == self.point[key]:
            return False
        old, loss = self.point[key], self.loss
        self.move(key, value)
        if self.loss < loss - 1e-6:
            return True
        self.move(key, old)
        return False

    def move(self, key: Key, value: float) -> None:
        """Set one constant."""
        self.point[key] = value
        scope, name = key
        for number, sample in enumerate(self.samples):
            known = name in sample.readers or name in _HOST
            if scope in sample.scopes and known:
                sample.reprice(self.point, name)
                self.errors[number] = sample.error(self.point)


def _weights(samples: list[_Sample]) -> np.ndarray[Any, np.dtype[np.float64]]:
    families = Counter(family_of(sample.row) for sample in samples)
    weights = np.array([1 / math.sqrt(families[family_of(sample.row)]) for sample in samples])
    return weights / weights.sum()


def family_of(row: Row) -> str:
    """Return what counts together: a model on a device in one precision."""
    return f"{row.family} {row.data['config']['precision']}"
