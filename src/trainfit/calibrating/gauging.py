"""Measure a device of this machine: groups of probes, the host, the context, and real steps in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime

import torch

from trainfit.basics.units import format_bytes
from trainfit.calibrating.answering import Lap, answer_all, fastest_products, fastest_stream, read_all
from trainfit.calibrating.calibration_result import (
    UNTRIED,
    Best,
    CalibrationResult,
    MeasuredFigure,
    with_constants,
    with_rates,
    with_uncertainty,
)
from trainfit.calibrating.checking import CPU_STEPS, GPU_STEPS, check_steps
from trainfit.calibrating.host_costs import host_constants
from trainfit.calibrating.instrument import Instrument
from trainfit.calibrating.probing import Readings, matmul_tf32
from trainfit.calibrating.questions import groups_for
from trainfit.calibrating.solving import Solved
from trainfit.costs.constants import CALIBRATED
from trainfit.devices.device_table import Device
from trainfit.timing.load import LoadMeter, busy_warning

_CHECK_SHARE = 0.25
"""Of the time that there is, for real steps."""
_LARGEST_CONTEXT = 2 << 30
"""More than this is not one program's context: others use the GPU as well."""
_FAR_APART = 0.25
"""Measurements of a rate that are so far apart are said to be."""


def gauge(instrument: Instrument, seconds: float, meter: LoadMeter, lap: Lap) -> CalibrationResult:
    """Measure a device for about this many seconds and say what comes of it.

    What the host takes is measured besides, for as long as that needs; `lap` is told as each stage ends.
    """
    # Products of float32 are exact unless a group says otherwise: TF32 is measured for itself.
    with meter.watching() as watch, matmul_tf32(False):
        groups = groups_for(instrument)
        readings = read_all(groups, instrument, seconds, lap)
        products, bandwidth = fastest_products(readings.values()), fastest_stream(readings["memory"])
        answers = answer_all(groups, readings, with_rates(instrument, products, bandwidth))
        lap("solve")
        kernel = answers.solved.get("kernel_seconds", Solved(CALIBRATED.kernel_seconds, None))
        solved = {**answers.solved, **host_constants(instrument, kernel.value)}
        lap("host")
        context, context_warnings = _context(instrument)
        device = replace(with_constants(answers.device, solved), context_bytes=context)
        kind_of_steps = CPU_STEPS if instrument.kind == "cpu" else GPU_STEPS
        steps, left_out = check_steps(kind_of_steps, device, instrument, _CHECK_SHARE * seconds)
        lap("real steps")
    busy = busy_warning(
        watch.share,
        "it was measured",
        "its figures are doubtful. Calibrate again when the machine is quiet.",
    )
    warnings = _warnings(readings, instrument, {**products, "memory": bandwidth})
    device = replace(device, name=_name(instrument), source=_source(instrument, watch.share))
    return CalibrationResult(
        device=with_uncertainty(device, steps),
        figures=_figures(instrument, products, bandwidth, device),
        constants=_constants(solved),
        undetermined=answers.undetermined,
        steps=steps,
        torch=torch.__version__,
        seconds={},
        other_load=watch.share,
        warnings=(*warnings, *context_warnings, *left_out, *busy),
    )


def _context(instrument: Instrument) -> tuple[int | None, tuple[str, ...]]:
    """Read what the driver counts beyond what torch's allocator has: the context and the loaded kernels."""
    if instrument.kind != "cuda":
        return None, ()
    instrument.synchronize()
    context = instrument.cuda.used_bytes() - instrument.cuda.reserved_bytes()
    if 0 < context <= _LARGEST_CONTEXT:
        return context, ()
    warning = (
        f"the driver counts {format_bytes(context)} beyond what torch has reserved: other programs use this "
        "GPU, so that the context's size is not known, and the figures may be too low."
    )
    return None, (warning,)


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
    *("wrapped_op", "conversion", "unit_op", "rank_reload"),
}
_FACTORS = {"cache_gain", "winograd_gain", "narrow_groups_gain", "depthwise_float32_waste"}


def _unit(constant: str) -> str:
    if constant in _SECONDS:
        return "seconds"
    if constant.endswith("_cycles"):
        return "cycles"
    if constant in _FACTORS:
        return "factor"
    return "bytes" if constant == "cache_bytes" else "share"


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


def _warnings(
    readings: Mapping[str, Readings], instrument: Instrument, rates: Mapping[str, Best]
) -> tuple[str, ...]:
    warnings = [UNTRIED] if instrument.kind == "cuda" else []
    for name, best in rates.items():
        if best.spread > _FAR_APART:
            warnings.append(f"measurements of {name} were far apart (± {best.spread:.0%}).")
    for group, found in readings.items():
        if found.sizes != instrument.sizes:
            warnings.append(f"{group}: smaller tensors were used, because memory ran out.")
        failures = sorted(set(found.failures.values()))
        if failures:
            names = ", ".join(sorted(found.failures))
            warnings.append(f"{group}: {names} could not be run: {failures[0]}")
    return tuple(warnings)
