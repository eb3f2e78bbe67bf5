"""From times to constants: each constant of the roofline becomes what makes it say what the clock said.

The probes are captured as a step is, so that the roofline prices the very operators that it would find in a
step. A constant is then looked for, by bisection, with which the prices of its probes agree with their times
in the geometric mean. Probes that something else holds up do not count; if all are, the constant stays what
it is in general.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from trainfit.basics.doing import unheard
from trainfit.calibrating.probes import Probe
from trainfit.calibrating.probing import BACKWARD, FORWARD, Key, empty_tensor
from trainfit.capturing import capture
from trainfit.costs.roofline import Roofline
from trainfit.devices.device_table import Device
from trainfit.devices.efficiency import Constants
from trainfit.steps.step import Step
from trainfit.timing.rounds import Timing
from trainfit.traces.trace import Trace
from trainfit.workspace.measured import Limits

_NOTHING = Limits(0, 0.0, 0.0)
"""Workspaces are of no interest here."""
_RANGE = 1e4
"""A constant is looked for from a ten-thousandth to ten thousand times the general one."""
_BISECTIONS = 34
"""They halve the logarithm of that range: what is left of it is nothing."""
_NEARBY, _LEAST_SLOPE = 1.1, 0.2
"""A price that changes by less than this share of a small change of the constant depends on other things."""


@dataclass(frozen=True)
class Question:
    """A constant, and the probes whose times decide it."""

    constant: str
    keys: tuple[Key, ...]


@dataclass(frozen=True)
class Solved:
    """The value of a constant, and how far the probes are apart that it was found from."""

    value: float
    spread: float | None
    """Relative: of what single probes would give, or of the clock if there is only one; None if unknown."""


class _Probes(nn.Module):
    """All probes as the parts of one model."""

    def __init__(self, probes: Sequence[Probe], place: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device=place))
        self.calls = nn.ModuleDict({probe.name: _ProbeCall(probe) for probe in probes})


class _ProbeCall(nn.Module):
    """One probe as a module."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self._probe = probe

    def forward(self, *tensors: torch.Tensor) -> object:
        return self._probe.call(*tensors)


class PricedProbes:
    """Prices probes by the roofline, with any constants."""

    def __init__(self, probes: Sequence[Probe], device: Device) -> None:
        """Capture the probes for the device: the kernels that it would choose."""
        with unheard():
            self._trace = capture(
                lambda: _step(probes, device.kind),
                device=device,
                target="calibrate",
                steps=1,
                limits=_NOTHING,
            )
        self._signatures = _signatures(self._trace, {probe.name for probe in probes})

    def seconds(self, key: Key, device: Device, constants: Constants) -> float:
        """Return what the roofline says that a probe takes."""
        model = Roofline(device, constants, self._trace.tf32)
        return sum(model.price(self._trace.signatures[number]).seconds for number in self._signatures[key])

    def solve(
        self, question: Question, timings: dict[Key, Timing], device: Device, constants: Constants
    ) -> Solved | None:
        """Return the value of a constant, all others as given; None if the probes do not tell."""
        keys = [key for key in question.keys if key in timings and key in self._signatures]
        if not keys:
            return None
        general = getattr(constants, question.constant)

        def excess(keys: Iterable[Key], value: float) -> float:
            """Return the mean logarithm of priced by measured."""
            changed = replace(constants, **{question.constant: value})
            return statistics.fmean(
                math.log(self.seconds(key, device, changed) / timings[key].seconds) for key in keys
            )

        keys = [key for key in keys if _ever_depends(functools.partial(excess, [key]), general)]
        while keys:
            value = _root(functools.partial(excess, keys), general)
            if value is None:
                return None
            depending = [key for key in keys if _depends(functools.partial(excess, [key]), value)]
            if depending == keys:
                break
            keys = depending
        else:
            return None
        alone = [_root(functools.partial(excess, [key]), general) for key in keys]
        found = [math.log(one) for one in alone if one is not None]
        if len(keys) == 1 or len(found) < 2:
            return Solved(value, timings[keys[0]].spread)
        return Solved(value, math.expm1(statistics.pstdev(found)))


def _ever_depends(excess: Callable[[float], float], general: float) -> bool:
    """Whether a price changes with the constant anywhere."""
    return excess(general / _RANGE) != excess(general * _RANGE)


def _depends(excess: Callable[[float], float], value: float) -> bool:
    """Whether a price changes with the constant where it is, or something else holds the probe up there."""
    change = abs(excess(value * _NEARBY) - excess(value / _NEARBY))
    return change > _LEAST_SLOPE * 2 * math.log(_NEARBY)


def _root(excess: Callable[[float], float], general: float) -> float | None:
    """Return where the function of the constant is zero; None if it is nowhere."""
    low, high = math.log(general / _RANGE), math.log(general * _RANGE)
    at_low, at_high = excess(math.exp(low)), excess(math.exp(high))
    if at_low * at_high > 0:
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if excess(math.exp(middle)) * at_low > 0:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def _step(probes: Sequence[Probe], place: str) -> Step:
    """Return a step that calls every probe once. It also trains a number: a step has to train something."""
    model = _Probes(probes, place)
    inputs = {probe.name: [empty_tensor(wanted, place) for wanted in probe.tensors] for probe in probes}

    def run() -> None:
        for probe in probes:
            tensors = inputs[probe.name]
            with torch.set_grad_enabled(probe.backward):
                result = model.calls[probe.name](*tensors)
            if probe.backward:
                trained = [tensor for tensor in tensors if tensor.requires_grad]
                torch.autograd.grad(result, trained, torch.empty_like(result))
        (model.weight * 1).sum().backward()
        model.weight.grad = None

    return Step(model, None, run)


def _signatures(trace: Trace, names: set[str]) -> dict[Key, list[int]]:
    """Return the operators of each probe by phase, without what was done around it."""
    found: dict[Key, list[int]] = {}
    for op in trace.ops:
        name = trace.module_name(op.module).rpartition(".")[2]
        if name in names and op.phase in (FORWARD, BACKWARD):
            found.setdefault((name, op.phase), []).append(op.signature)
    return found
