"""Which constants of the roofline hold for a device: the general ones, its architecture's, its own."""

from __future__ import annotations

from dataclasses import replace

from trainfit.costs.calibration import CALIBRATIONS, NEAREST, Calibration
from trainfit.devices.device_table import Device
from trainfit.devices.efficiency import Constants

CALIBRATED = Constants()
"""Where nothing else is known."""


def constants_of(device: Device) -> Constants:
    """Return the general constants, replaced by those of its architecture or its nearest, and by its own."""
    architecture = device.architecture
    found = dict(CALIBRATIONS.get(NEAREST.get(architecture, architecture), Calibration()).constants)
    if architecture in NEAREST:
        found.pop("uncertainty", None)
    return replace(CALIBRATED, **(found | device.constants))


def uncalibrated_width(device: Device, constants: Constants) -> float:
    """Return how far off what was not calibrated may be: known of its architecture, its maker, or nothing."""
    if device.architecture in CALIBRATIONS:
        return constants.related_uncertainty
    nvidia = not device.architecture or device.architecture.startswith("sm_")
    return constants.uncalibrated_uncertainty if nvidia else constants.foreign_uncertainty
