"""`CalibrationResult`: what was measured on a device of this machine, and the device that comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainfit.calibrating.checking import CheckedStep
from trainfit.calibrating.instrument import Instrument
from trainfit.calibrating.solving import Solved
from trainfit.devices.device_table import Device
from trainfit.devices.efficiency import Constants

UNTRIED = (
    "no GPU has run this calibration yet: it was written and tested with a stand-in for one. Compare the "
    "real steps with what was predicted for them before you rely on it."
)
"""What is said of every calibration of a GPU until one has run it."""
_LARGEST_SHARE = 1.5
"""A share of the datasheet's peak above this says that the datasheet is another card's."""


@dataclass(frozen=True)
class MeasuredFigure:
    """A figure, how far its measurements were apart, and what it is compared with."""

    name: str
    group: str
    value: float
    unit: str
    """`FLOP/s`, `bytes/s`, `bytes`, `seconds`, `share`, ..."""
    spread: float | None
    """Half the distance between the quartiles, or between probes, relative to the figure; None if unknown."""
    reference: float | None
    """The datasheet's figure, or the constant that holds in general; None if there is none."""

    @property
    def ratio(self) -> float | None:
        """Measured by reference."""
        return self.value / self.reference if self.reference else None


@dataclass(frozen=True)
class CalibrationResult:
    """A device of this machine as it was measured."""

    device: Device
    """With everything that was measured, ready to be used in place of the table's entry."""
    figures: tuple[MeasuredFigure, ...]
    """Rates beside the datasheet's, and what the CUDA context takes."""
    constants: tuple[MeasuredFigure, ...]
    """Constants of the roofline and of the host, beside the general ones."""
    undetermined: tuple[str, ...]
    """Constants that keep their general value: something else held their probes up, or they did not run."""
    steps: tuple[CheckedStep, ...]
    """Steps as predicted with these figures, and as they really ran."""
    torch: str
    seconds: dict[str, float]
    """Wall time of each stage."""
    other_load: float | None
    """The share of this machine's processors that other work took meanwhile; None if it is not known."""
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Best:
    """The fastest that was seen of something, per second, and how far its measurements were apart."""

    rate: float
    spread: float


def with_rates(instrument: Instrument, products: Mapping[str, Best], bandwidth: Best) -> Device:
    """Return the device with its rates.

    Where the table knows the device, the datasheet's peaks stay, so that MFU means what it means elsewhere,
    and `matmul_share` says how much of them a product gets in the dtype that mixed precision uses. The peak
    of the other dtype of 16 bits is then such that the same share of it is what was measured.
    """
    device, reference = instrument.device, instrument.rate_of_steps
    measured = {rate: best.rate for rate, best in products.items()}
    peak = device.flops.get(reference)
    share = measured[reference] / peak if peak and reference in measured else None
    spreads = {rate: best.spread for rate, best in products.items()} | {"bandwidth": bandwidth.spread}
    if not instrument.known or share is None or share > _LARGEST_SHARE:
        device = replace(device, flops=measured, matmul_share=1.0)
    else:
        apart = ("fp32", "tf32", reference)  # the first two have constants of their own
        others = {rate: found / share for rate, found in measured.items() if rate not in apart}
        device = replace(device, flops={**measured, **device.flops, **others}, matmul_share=share)
    return replace(
        device,
        bandwidth_bytes_per_second=device.bandwidth_bytes_per_second or bandwidth.rate,
        spreads=spreads,
    )


def with_constants(device: Device, found: Mapping[str, Solved]) -> Device:
    """Return the device with constants of its own."""
    return replace(
        device,
        constants={**device.constants, **{name: solved.value for name, solved in found.items()}},
        spreads={
            **device.spreads,
            **{name: solved.spread for name, solved in found.items() if solved.spread is not None},
        },
    )


def with_uncertainty(device: Device, steps: tuple[CheckedStep, ...]) -> Device:
    """Return the device with the range that real steps stayed within; not narrower than the general one.

    The general one comes from many published steps, and this one from a few that ran here. Without any, the
    device counts as one that nothing is known about.
    """
    general = Constants()
    errors = [max(step.ratio, 1.0 / step.ratio) - 1.0 for step in steps]
    width = max([general.uncertainty, *errors]) if errors else general.uncalibrated_uncertainty
    widths = {"uncertainty": width, "host_uncertainty": width}
    return replace(device, calibrated=True, constants={**device.constants, **widths})
