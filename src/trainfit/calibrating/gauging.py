"""Measure a device of this machine: groups of probes, the host, the context, and real steps in the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime

import torch

from trainfit.basics.doing import doing
from trainfit.basics.units import format_bytes
from trainfit.calibrating.calibration import (
    UNTRIED,
    Best,
    Calibration,
    MeasuredFigure,
    with_constants,
    with_rates,
    with_uncertainty,
)
from trainfit.calibrating.checking import CPU_STEPS, GPU_STEPS, check_steps
from trainfit.calibrating.host_costs import host_constants
from trainfit.calibrating.instrument import Instrument
from trainfit.calibrating.probes import LARGE
from trainfit.calibrating.probing import FORWARD, Readings, matmul_tf32, read_group
from trainfit.calibrating.questions import ProbeGroup, groups_for
from trainfit.calibrating.solving import PricedProbes, Question, Solved
from trainfit.costs.constants import CALIBRATED, constants_of
from trainfit.devices.device_table import Device
from trainfit.errors import DeviceError
from trainfit.timing.load import LoadMeter, busy_warning

_CHECK_SHARE = 0.25
"""Of the time that there is, for real steps."""
_LARGEST_CONTEXT = 2 << 30
"""More than this is not one program's context: others use the GPU as well."""
_FAR_APART = 0.25
"""Measurements of a rate that are so far apart are said to be."""
Lap = Callable[[str], None]


@dataclass
class _Found:
    """What has been measured so far."""

    device: Device
    readings: dict[str, Readings] = field(default_factory=dict)
    solved: dict[str, Solved] = field(default_factory=dict)
    undetermined: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def gauge(instrument: Instrument, seconds: float, meter: LoadMeter, lap: Lap) -> Calibration:
    """Measure a device for about this many seconds and say what comes of it.

    What the host takes is measured besides, for as long as that needs; `lap` is told as each stage ends.
    """
    found = _Found(instrument.device)
    # Products of float32 are exact unless a probe says otherwise: TF32 is measured for itself.
    with meter.watching() as watch, matmul_tf32(False):
        groups = groups_for(instrument)
        for group in groups:
            found.readings[group.name] = read_group(group.name, group.make, instrument, group.share * seconds)
            lap(group.name)
        products, bandwidth = _best(found.readings["matrix products"]), _bandwidth(found.readings["memory"])
        found.device = with_rates(instrument, products, bandwidth)
        for group in groups:
            _solve(found, group)
        lap("solve")
        kernel = found.solved.get("kernel_seconds", Solved(CALIBRATED.kernel_seconds, None))
        found.solved |= host_constants(instrument, kernel.value)
        found.device = with_constants(found.device, found.solved)
        lap("host")
        _look_at_context(found, instrument)
        steps, left_out = check_steps(
            CPU_STEPS if instrument.kind == "cpu" else GPU_STEPS,
            found.device,
            instrument,
            _CHECK_SHARE * seconds,
        )
        lap("real steps")
    found.warnings += left_out
    found.warnings += busy_warning(
        watch.share,
        "it was measured",
        "its figures are doubtful. Calibrate again when the machine is quiet.",
    )
    device = with_uncertainty(replace(found.device, source=_source(instrument, watch.share)), steps)
    return Calibration(
        device=replace(device, name=_name(instrument)),
        figures=_figures(instrument, products, bandwidth, device),
        constants=_constants(found.solved),
        undetermined=tuple(found.undetermined),
        steps=steps,
        torch=torch.__version__,
        seconds={},
        other_load=watch.share,
        warnings=_warnings(found, instrument, {**products, "memory": bandwidth}),
    )


def _best(readings: Readings) -> dict[str, Best]:
    """Return the fastest product of each dtype, of the large ones: those of others say less."""
    best: dict[str, Best] = {}
    for probe in readings.probes:
        timing = readings.timings.get((probe.name, FORWARD))
        if timing is not None and probe.name.endswith(LARGE):
            rate = probe.flops / timing.seconds
            if rate > best.get(probe.rate, Best(0.0, 0.0)).rate:
                best[probe.rate] = Best(rate, timing.spread)
    if "fp32" not in best:
        raise DeviceError(
            "no matrix product could be run on this device: "
            + "; ".join(sorted(set(readings.failures.values()))[:1] or ["torch did not say why"])
        )
    return best


def _bandwidth(readings: Readings) -> Best:
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


def _solve(found: _Found, group: ProbeGroup) -> None:
    """Find the constants that a group decides, with those that were found before."""
    doing(f"working out the constants of {group.name}")
    readings = found.readings[group.name]
    ran = [probe for probe in readings.probes if (probe.name, FORWARD) in readings.timings]
    questions = group.ask(readings.probes)
    if not ran:
        found.undetermined += [question.constant for question in questions]
        return
    priced = PricedProbes(ran, found.device)
    for question in questions:
        solved = _answer(priced, question, readings, found)
        if solved is None:
            found.undetermined.append(question.constant)
        else:
            found.solved[question.constant] = solved


def _answer(priced: PricedProbes, question: Question, readings: Readings, found: _Found) -> Solved | None:
    constants = constants_of(with_constants(found.device, found.solved))
    return priced.solve(question, readings.timings, found.device, constants)


def _look_at_context(found: _Found, instrument: Instrument) -> None:
    """Read what the driver counts beyond what torch's allocator has: the context and the loaded kernels."""
    if instrument.kind != "cuda":
        return
    instrument.synchronize()
    context = instrument.cuda.used_bytes() - instrument.cuda.reserved_bytes()
    if 0 < context <= _LARGEST_CONTEXT:
        found.device = replace(found.device, context_bytes=context)
    else:
        found.warnings.append(
            f"the driver counts {format_bytes(context)} beyond what torch has reserved: other programs use "
            "this GPU, so that the context's size is not known, and the figures may be too low."
        )


def _name(instrument: Instrument) -> str:
    return f"{instrument.device.name} (calibrated)"


def _source(instrument: Instrument, load: float | None) -> str:
    """Say where and how the figures were found, for whoever reads the file later."""
    parts = [f"measured by trainfit calibrate on {datetime.now(UTC):%Y-%m-%d} with torch {torch.__version__}"]
    if instrument.kind == "cuda":
        driver = instrument.cuda.driver()
        parts += [f"driver {driver}"] if driver else []
        parts += [f"peaks of {instrument.device.name} from its datasheet"] if instrument.known else []
        parts.append("no GPU had run this calibration when it was released")
    else:
        parts.append(f"{torch.get_num_threads()} thread(s)")
    if load is not None:
        parts.append(f"other work took {load:.0%} of the processors")
    return "; ".join(parts)


def _figures(
    instrument: Instrument, products: Mapping[str, Best], bandwidth: Best, device: Device
) -> tuple[MeasuredFigure, ...]:
    known = instrument.device
    found = [
        MeasuredFigure(
            f"{rate} product", "matrix products", best.rate, "FLOP/s", best.spread, known.flops.get(rate)
        )
        for rate, best in products.items()
    ]
    sheet = known.bandwidth_bytes_per_second
    found.append(MeasuredFigure("memory", "memory", bandwidth.rate, "bytes/s", bandwidth.spread, sheet))
    if device.context_bytes:
        found.append(MeasuredFigure("CUDA context", "memory", device.context_bytes, "bytes", None, None))
    return tuple(found)


_SECONDS = {
    *("kernel_seconds", "forward_op", "backward_op", "optimizer_op", "view_op", "module_call", "tensor"),
    *("region_call", "region_op", "checkpoint_call", "checkpoint_op", "launch", "reload"),
}
_FLOPS = {"depthwise_flops", "depthwise_float32_flops"}


def _unit(constant: str) -> str:
    if constant in _SECONDS:
        return "seconds"
    if constant in _FLOPS:
        return "FLOP per cycle and multiprocessor"
    return {"cache_bytes": "bytes", "cache_gain": "factor"}.get(constant, "share")


def _constants(solved: Mapping[str, Solved]) -> tuple[MeasuredFigure, ...]:
    order = [known.name for known in fields(CALIBRATED) if known.name in solved]
    return tuple(
        MeasuredFigure(
            name,
            "constants",
            solved[name].value,
            _unit(name),
            solved[name].spread,
            getattr(CALIBRATED, name) or None,
        )
        for name in order
    )


def _warnings(found: _Found, instrument: Instrument, rates: Mapping[str, Best]) -> tuple[str, ...]:
    warnings = [UNTRIED] if instrument.kind == "cuda" else []
    for name, best in rates.items():
        if best.spread > _FAR_APART:
            warnings.append(f"measurements of {name} were far apart (± {best.spread:.0%}).")
    for group, readings in found.readings.items():
        if readings.sizes != instrument.sizes:
            warnings.append(f"{group}: smaller tensors were used, because memory ran out.")
        failures = sorted(set(readings.failures.values()))
        if failures:
            names = ", ".join(sorted(readings.failures))
            warnings.append(f"{group}: {names} could not be run: {failures[0]}")
    return (*warnings, *found.warnings)
