"""`calibrate`: this machine's device file."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from trainfit.api.request import default_device
from trainfit.api.stopwatch import Stopwatch
from trainfit.basics.doing import Measuring, Progress, heard_by
from trainfit.calibrating.calibration_result import CalibrationResult
from trainfit.calibrating.gauging import gauge
from trainfit.calibrating.instrument import cpu_instrument, gpu_instrument
from trainfit.devices.device_file import save_device
from trainfit.devices.hardware import CUDA, Cuda
from trainfit.errors import DeviceError, OptionError
from trainfit.timing.load import LoadMeter

DEFAULT_MINUTES = 3.0
_MOST_MINUTES = 120.0


def calibrate(
    device: str | None = None,
    *,
    output: str | None = None,
    minutes: float = DEFAULT_MINUTES,
    progress: Progress | None = None,
    measuring: Measuring | None = None,
) -> CalibrationResult:
    """Measure a device of this machine for some minutes, and return what was found.

    `device` is `cpu`, `cuda` or `cuda:1`; without it, the GPU if there is one. `result.device` can be given
    wherever a device is expected. With `output`, it is also written to that file, in the end and whole.
    """
    with heard_by(progress, measuring):
        result = calibrate_machine(device, minutes)
    if output is not None:
        save_device(result.device, output)
    return result


def calibrate_machine(
    device: str | None = None,
    minutes: float = DEFAULT_MINUTES,
    *,
    cuda: Cuda = CUDA,
    meter: LoadMeter | None = None,
) -> CalibrationResult:
    """Measure a device; `calibrate` says what the arguments mean."""
    if type(minutes) not in (int, float) or not math.isfinite(minutes) or not 0 < minutes <= _MOST_MINUTES:
        raise OptionError(
            f"--minutes must be a number above 0 and at most {_MOST_MINUTES:g}, got {minutes!r:.60}."
        )
    watch = Stopwatch()
    number = _gpu_number(default_device() if device is None else device)
    seconds, meter = 60.0 * minutes, meter or LoadMeter()
    if number is None:
        result = gauge(cpu_instrument(), seconds, meter, watch.lap)
    else:
        with gpu_instrument(number, cuda) as instrument:
            result = gauge(instrument, seconds, meter, watch.lap)
    return replace(result, seconds=watch.seconds)


def _gpu_number(device: str) -> int | None:
    """Return the number of the GPU that is meant; None for the processor."""
    lowered = device.strip().lower() if isinstance(device, str) else ""
    if lowered == "cpu":
        return None
    found = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", lowered)
    if found is None:
        raise DeviceError(
            f"calibrate measures a device of this machine, and {device!r:.80} does not name one: write cuda "
            "(the GPU in it), cuda:1 (the second) or cpu."
        )
    return int(found[1] or 0)
