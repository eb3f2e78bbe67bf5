"""Measure all groups of probes, and find the rates and the constants that their times lead to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainfit.basics.doing import doing
from trainfit.calibrating.calibration_result import Best, with_constants
from trainfit.calibrating.instrument import Instrument
from trainfit.calibrating.probes import LARGE
from trainfit.calibrating.probing import FORWARD, Readings, matmul_tf32, read_group
from trainfit.calibrating.questions import ProbeGroup
from trainfit.calibrating.solving import PricedProbes, Solved
from trainfit.costs.constants import constants_of
from trainfit.devices.device_table import Device
from trainfit.errors import DeviceError

NEUTRAL = {"memory_share": 1.0, "host_factor": 1.0}
"""Constants that correct others for an architecture or a host: nothing is left to be corrected here."""
Lap = Callable[[str], None]


@dataclass(frozen=True)
class Answers:
    """What the probes say about a device."""

    device: Device
    """With its rates, and constants that are the same whatever is measured."""
    solved: dict[str, Solved]
    undetermined: tuple[str, ...]
    """Constants that none of the probes decides."""


def read_all(
    groups: Sequence[ProbeGroup], instrument: Instrument, seconds: float, lap: Lap
) -> dict[str, Readings]:
    """Measure all groups of probes; each has its share of the time."""
    found: dict[str, Readings] = {}
    for group in groups:
        with matmul_tf32(group.tf32):
            found[group.name] = read_group(group.name, group.make, instrument, group.share * seconds)
        lap(group.name)
    return found


def answer_all(groups: Sequence[ProbeGroup], readings: Mapping[str, Readings], device: Device) -> Answers:
    """Find the constants that the groups decide, each with those that were found before."""
    device = replace(device, constants={**device.constants, **NEUTRAL})
    solved: dict[str, Solved] = {}
    asked: dict[str, None] = {}
    for group in groups:
        doing(f"working out the constants of {group.name}")
        found = readings[group.name]
        ran = [probe for probe in found.probes if (probe.name, FORWARD) in found.timings]
        with matmul_tf32(group.tf32):
            priced = PricedProbes(ran, device)
        for question in group.ask(found.probes):
            asked[question.constant] = None
            constants = constants_of(with_constants(device, solved))
            answer = priced.solve(question, found.timings, device, constants)
            if answer is not None:
                solved[question.constant] = answer
    return Answers(device, solved, tuple(name for name in asked if name not in solved))


def fastest_products(groups: Iterable[Readings]) -> dict[str, Best]:
    """Return the fastest product of each dtype, of the large ones: those of others say less."""
    best: dict[str, Best] = {}
    failures: list[str] = []
    for readings in groups:
        for probe in readings.probes:
            timing = readings.timings.get((probe.name, FORWARD))
            if probe.flops and timing is not None and probe.name.endswith(LARGE):
                rate = probe.flops / timing.seconds
                if rate > best.get(probe.rate, Best(0.0, 0.0)).rate:
                    best[probe.rate] = Best(rate, timing.spread)
        failures += readings.failures.values()
    if "fp32" not in best:
        why = failures[0] if failures else "torch did not say why"
        raise DeviceError(f"no matrix product could be run on this device: {why}.")
    return best


def fastest_stream(readings: Readings) -> Best:
    """Return the most bytes per second that were read and written straight through."""
    rates = [
        Best(
            probe.moved_bytes / readings.timings[probe.name, FORWARD].seconds,
            readings.timings[probe.name, FORWARD].spread,
        )
        for probe in readings.probes
        if probe.moved_bytes and (probe.name, FORWARD) in readings.timings
    ]
    if not rates:
        raise DeviceError("nothing could be copied on this device: its bandwidth is not known.")
    return max(rates, key=lambda best: best.rate)
